// The flag table: see flags.h.
#include "kernels/flags.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// `where` is the file that a value came from; NULL = the command line
static const char *place(const char *where) { return where ? where : "command line"; }
static int status_of(const char *where) { return where ? STATUS_DATA : STATUS_USAGE; }

// ---- names -----------------------------------------------------------------------------------------------------------
static int is_heading(const Flag *f) { return f->name[0] == 0; }

static Flag *find(Flag *flags, const char *name, size_t n) {
    for (Flag *f = flags; f->name; f++)
        if (!is_heading(f) && strlen(f->name) == n && memcmp(f->name, name, n) == 0) return f;
    return NULL;
}

Flag *flags_find(Flag *flags, const char *name) { return find(flags, name, strlen(name)); }

// Levenshtein's distance between a (n characters) and b, at most 63 of each
static int distance(const char *a, size_t n, const char *b) {
    int row[64];
    size_t m = strlen(b);
    if (n > 63 || m > 63) return 64;
    for (size_t j = 0; j <= m; j++) row[j] = (int)j;
    for (size_t i = 1; i <= n; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= m; j++) {
            int change = diagonal + (a[i - 1] != b[j - 1]), grow = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            diagonal = row[j];
            row[j] = change < grow ? change : grow;
        }
    }
    return row[m];
}

_Noreturn static void unknown(Flag *flags, const char *name, size_t n, const char *where) {
    const char *nearest = NULL;
    int best = n < 6 ? 3 : 4; // farther names are no help
    for (Flag *f = flags; f->name; f++) {
        int d = is_heading(f) ? 64 : distance(name, n, f->name);
        int starts = !is_heading(f) && n > 1 && strncmp(f->name, name, n) == 0;
        if (starts) d = 1;
        if (d < best) best = d, nearest = f->name;
    }
    if (nearest) die(status_of(where), __FILE__, __LINE__, "%s: unknown flag \"%.*s\" (hint: did you mean --%s?)", place(where), (int)n,
                     name, nearest);
    die(status_of(where), __FILE__, __LINE__, "%s: unknown flag \"%.*s\" (hint: --help lists them)", place(where), (int)n, name);
}

// ---- values ----------------------------------------------------------------------------------------------------------
// Limits past 1e15 stand for "none": a double cannot tell integers apart much beyond.
static char *range_text(const Flag *f) {
    int low = f->min > -1e15, high = f->max < 1e15;
    int number = f->kind == FLAG_INT || f->kind == FLAG_DOUBLE;
    if (!number || (f->min == 0 && f->max == 0) || (!low && !high)) return str_format("%s", "");
    if (low && high) return str_format("%.10g to %.10g", f->min, f->max);
    return low ? str_format(">= %.10g", f->min) : str_format("<= %.10g", f->max);
}

_Noreturn static void out_of_range(const Flag *f, const char *text, const char *where) {
    char *range = range_text(f);
    die(status_of(where), __FILE__, __LINE__, "%s: --%s is %s, expected %s", place(where), f->name, text, range);
}

static void set_int(const Flag *f, const char *text, const char *where) {
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    int plain = strspn(text, "0123456789+-") == strlen(text) && *text;
    CHECK_AS(status_of(where), plain && !*end, "%s: --%s is \"%s\", expected a whole number", place(where), f->name, text);
    CHECK_AS(status_of(where), errno == 0, "%s: --%s is %s, which does not fit 64 bits", place(where), f->name, text);
    int any = f->min == 0 && f->max == 0; // as integers: a double would round the number to the limit
    if (!any && ((__int128)v < (__int128)f->min || (__int128)v > (__int128)f->max)) out_of_range(f, text, where);
    *(int64_t *)f->value = v;
}

static void set_double(const Flag *f, const char *text, const char *where) {
    char *end;
    errno = 0;
    double v = strtod(text, &end);
    int plain = strspn(text, "0123456789+-.eE") == strlen(text) && *text; // no inf, nan, hexadecimal, blanks
    CHECK_AS(status_of(where), plain && end != text && !*end, "%s: --%s is \"%s\", expected a finite number such as 0.1 or 1e-3",
             place(where), f->name, text);
    CHECK_AS(status_of(where), errno == 0 && isfinite(v), "%s: --%s is %s, which a double cannot hold", place(where), f->name, text);
    int any = f->min == 0 && f->max == 0;
    if (!any && !(v >= f->min && v <= f->max)) out_of_range(f, text, where);
    *(double *)f->value = v;
}

static void set_choice(const Flag *f, const char *text, const char *where) {
    size_t n = strlen(text);
    int index = 0;
    for (const char *at = f->choices; at; index++) {
        size_t length = strcspn(at, "|");
        if (length == n && memcmp(at, text, n) == 0) {
            *(int *)f->value = index;
            return;
        }
        at = at[length] ? at + length + 1 : NULL;
    }
    die(status_of(where), __FILE__, __LINE__, "%s: --%s is \"%s\", expected one of %s", place(where), f->name, text, f->choices);
}

static char *choice_text(const Flag *f) {
    const char *at = f->choices;
    for (int i = *(int *)f->value; i > 0; i--) at += strcspn(at, "|") + 1;
    return str_format("%.*s", (int)strcspn(at, "|"), at);
}

static char *value_text(const Flag *f) {
    switch (f->kind) {
    case FLAG_INT: return str_format("%lld", (long long)*(int64_t *)f->value);
    case FLAG_DOUBLE: return str_format("%.10g", *(double *)f->value);
    case FLAG_BOOL: return str_format("%s", *(int *)f->value ? "yes" : "no");
    case FLAG_CHOICE: return choice_text(f);
    case FLAG_STRING: break;
    }
    const char *s = *(const char **)f->value;
    return str_format("%s", s ? s : "none");
}

static void set_text(const Flag *f, const char *text, const char *where) {
    switch (f->kind) {
    case FLAG_INT: set_int(f, text, where); break;
    case FLAG_DOUBLE: set_double(f, text, where); break;
    case FLAG_STRING: *(const char **)f->value = text; break;
    case FLAG_CHOICE: set_choice(f, text, where); break;
    case FLAG_BOOL:
        CHECK_USAGE((*text == '0' || *text == '1') && !text[1], "%s: --%s is \"%s\", expected --%s, --no-%s, or =0 or =1", place(where),
                    f->name, text, f->name, f->name);
        *(int *)f->value = *text == '1';
    }
}

// ---- command line ----------------------------------------------------------------------------------------------------
static void print_help(const Flag *flags, const char *program, const char *synopsis) {
    printf("%s\nusage: %s [flags]\n", synopsis, program);
    for (const Flag *f = flags; f->name; f++) {
        if (is_heading(f)) {
            printf("\n%s\n", f->help);
            continue;
        }
        static const char *const kinds[] = {" N", " X", " TEXT", "", ""};
        char *head = f->kind == FLAG_CHOICE ? str_format("--%s %s", f->name, f->choices) :
                     f->kind == FLAG_BOOL ? str_format("--%s, --no-%s", f->name, f->name) :
                                            str_format("--%s%s", f->name, kinds[f->kind]);
        char *value = value_text(f), *range = range_text(f);
        printf("  %-26s%s %s (default %s%s%s)\n", head, strlen(head) > 26 ? "\n                            " : "", f->help, value,
               *range ? "; " : "", range);
        free(head), free(value), free(range);
    }
    printf("\n  %-26s %s\n  %-26s %s\n", "--config FILE", "read a stored configuration first; the command line wins", "--help",
           "this text");
}

// One flag at argv[i], named `name` (without dashes). Returns how many arguments it took.
static int take(Flag *flags, char **argv, int i, int argc, const char **config) {
    const char *name = argv[i] + 2, *where = place(NULL);
    size_t n = strcspn(name, "=");
    const char *value = name[n] ? name + n + 1 : NULL;
    int is_config = n == 6 && memcmp(name, "config", 6) == 0;
    Flag *f = is_config ? NULL : find(flags, name, n);
    int negative = 0;
    if (!f && !is_config && n > 3 && memcmp(name, "no-", 3) == 0) {
        f = find(flags, name + 3, n - 3);
        negative = f && f->kind == FLAG_BOOL;
        if (!negative) f = NULL;
    }
    if (!f && !is_config) unknown(flags, name, n, NULL);
    CHECK_USAGE(is_config ? !*config : !f->set, "%s: --%.*s is given twice", where, (int)n, name);
    if (f) f->set = 1;
    if (f && f->kind == FLAG_BOOL && !value) {
        *(int *)f->value = !negative;
        return 1;
    }
    CHECK_USAGE(!negative, "%s: --%.*s takes no value (hint: --%s=0 or --%s=1)", where, (int)n, name, f->name, f->name);
    int used = 1;
    if (!value) {
        int there = i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0;
        CHECK_USAGE(there, "%s: --%s needs a value (hint: --%s VALUE or --%s=VALUE)", where, name, name, name);
        value = argv[i + 1];
        used = 2;
    }
    if (is_config) *config = value;
    else set_text(f, value, NULL);
    return used;
}

int flags_parse(Flag *flags, const char *program, const char *synopsis, int argc, char **argv) {
    const char *config = NULL;
    int n = 0;
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            if (launcher_rank() == 0) print_help(flags, program, synopsis);
            stdout_check();
            exit(STATUS_OK);
        }
    for (Flag *f = flags; f->name; f++) f->set = 0;
    for (int i = 1, flags_ended = 0; i < argc;) {
        if (flags_ended || argv[i][0] != '-' || !argv[i][1]) {
            argv[++n] = argv[i++];
        } else if (strcmp(argv[i], "--") == 0) {
            flags_ended = 1, i++;
        } else {
            CHECK_USAGE(argv[i][1] == '-', "command line: unknown flag \"%s\" (hint: flags begin with two dashes; --help lists "
                        "them)", argv[i]);
            i += take(flags, argv, i, argc, &config);
        }
    }
    if (config) {
        size_t length;
        char *text = file_read(config, &length);
        json_error_t e;
        json_t *object = json_loadb(text, length, JSON_REJECT_DUPLICATES, &e);
        CHECK_DATA(object, "%s: line %d: %s (expected a JSON object with flags' names)", config, e.line, e.text);
        flags_load(flags, object, config);
        json_decref(object);
        free(text);
    }
    return n;
}

// ---- stored configuration --------------------------------------------------------------------------------------------
static void load_one(Flag *f, json_t *v, const char *where) {
    static const char *const expected[] = {"a whole number", "a number", "a string", "true or false", "a string"};
    int fits = f->kind == FLAG_INT ? json_is_integer(v) : f->kind == FLAG_DOUBLE ? json_is_number(v) :
               f->kind == FLAG_BOOL ? json_is_boolean(v) : json_is_string(v) || (f->kind == FLAG_STRING && json_is_null(v));
    if (!fits) {
        char *text = json_dumps(v, JSON_ENCODE_ANY);
        die(STATUS_DATA, __FILE__, __LINE__, "%s: \"%s\" is %s, expected %s", where, f->name, text, expected[f->kind]);
    }
    if (f->set) return;
    char number[64] = "";
    if (f->kind == FLAG_INT) snprintf(number, sizeof number, "%lld", (long long)json_integer_value(v));
    if (f->kind == FLAG_DOUBLE) snprintf(number, sizeof number, "%.17g", json_number_value(v));
    switch (f->kind) {
    case FLAG_INT: set_int(f, number, where); break;
    case FLAG_DOUBLE: set_double(f, number, where); break;
    case FLAG_BOOL: *(int *)f->value = json_is_true(v); break;
    case FLAG_CHOICE: set_choice(f, json_string_value(v), where); break;
    case FLAG_STRING: *(const char **)f->value = json_is_null(v) ? NULL : str_format("%s", json_string_value(v)); break;
    }
    f->set = 2;
}

void flags_load(Flag *flags, json_t *object, const char *where) {
    CHECK_DATA(json_is_object(object), "%s: expected a JSON object with flags' names", where);
    const char *key;
    json_t *v;
    json_object_foreach(object, key, v) {
        Flag *f = flags_find(flags, key);
        if (!f) unknown(flags, key, strlen(key), where);
        load_one(f, v, where);
    }
}

json_t *flags_json(const Flag *flags) {
    json_t *object = json_object();
    for (const Flag *f = flags; f->name; f++) {
        if (is_heading(f)) continue;
        char *choice = f->kind == FLAG_CHOICE ? choice_text(f) : NULL;
        const char *text = f->kind == FLAG_STRING ? *(const char **)f->value : choice;
        json_t *v = f->kind == FLAG_INT ? json_integer(*(int64_t *)f->value) :
                    f->kind == FLAG_DOUBLE ? json_real(*(double *)f->value) :
                    f->kind == FLAG_BOOL ? json_boolean(*(int *)f->value) : text ? json_string(text) : json_null();
        CHECK_USAGE(v && json_object_set_new(object, f->name, v) == 0, "--%s cannot be stored as JSON (expected a finite number, "
                    "text in UTF-8)",
                    f->name);
        free(choice);
    }
    return object;
}

void flags_free(Flag *flags) {
    for (Flag *f = flags; f->name; f++) {
        if (is_heading(f) || f->kind != FLAG_STRING || f->set != 2) continue;
        free(*(char **)f->value);
        *(const char **)f->value = NULL;
    }
}

void flags_print(const Flag *flags, FILE *out) {
    enum { NAME = 18, VALUE = 14, COLUMNS = 3 };
    int column = 0;
    for (const Flag *f = flags; f->name; f++) {
        if (is_heading(f)) {
            fprintf(out, "%s%s\n", column ? "\n" : "", f->help);
            column = 0;
            continue;
        }
        char *value = value_text(f);
        int width = (int)strlen(value), mark = f->set ? '*' : ' '; // * = given by the user
        if (width > VALUE && column) fputc('\n', out), column = 0; // long ones get a line of their own
        int last = width > VALUE || ++column == COLUMNS || !f[1].name || is_heading(f + 1);
        fprintf(out, "%s%c %-*s %-*s", column > 1 ? " |" : " ", mark, NAME, f->name, last ? 0 : VALUE, value);
        if (last) fputc('\n', out), column = 0;
        free(value);
    }
}
