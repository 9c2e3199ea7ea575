// One table of flags gives parsing, ranges, --help, the start table and the stored configuration.
#ifndef MOE_FLAGS_H
#define MOE_FLAGS_H
#include <jansson.h>
#include <stdint.h>
#include <stdio.h>

typedef enum { FLAG_INT, FLAG_DOUBLE, FLAG_STRING, FLAG_BOOL, FLAG_CHOICE } FlagKind;
typedef struct Flag {
    const char *name;      // without the dashes; NULL ends the table; name "" with help = heading of a section
    FlagKind kind;
    void *value;           // int64_t *, double *, const char **, int * (BOOL: --x, --no-x or --x=0/1; CHOICE: index into choices)
    double min, max;       // of numbers, inclusive; both 0 = any
    const char *choices;   // CHOICE: "none|topoep"
    const char *help;      // one line, with the unit; defaults are what *value holds before parsing and are printed
    int set;               // filled by parsing: 0 = default, 1 = command line, 2 = file
} Flag;

// Parses --name value and --name=value; --help prints the table and exits 0; --config FILE reads a stored configuration
// first (JSON object with the flags' names), the command line wins. Positional arguments are moved to the front of argv
// and counted in the result (argv[1..n]). Unknown, repeated, malformed or out-of-range: STATUS_USAGE, with the nearest name;
// in a file STATUS_DATA, with the file's.
int flags_parse(Flag *flags, const char *program, const char *synopsis, int argc, char **argv);
void flags_load(Flag *flags, json_t *object, const char *where); // values of a stored configuration, for flags not set
json_t *flags_json(const Flag *flags);                           // all values
void flags_print(const Flag *flags, FILE *out);                  // the start table: two or three flags a line
void flags_free(Flag *flags);                                    // the strings that came from a file
Flag *flags_find(Flag *flags, const char *name);                 // NULL when there is none
#endif
