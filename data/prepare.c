// Text to token shards: build/prepare --out DIR INPUT... writes DIR/train.bin and DIR/val.bin.
//
// Each input is split by itself: the last --val-fraction of its bytes (separators not counted) is for validation. The cut is at
// exactly that byte; a document across it is cut in two. Each document, or part of one, begins with the separator token.
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "data/shard.h"
#include "data/tokenizer.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include "kernels/flags.h"

enum { FORMAT_TEXT, FORMAT_JSONL };
enum { DOCUMENTS_MARK, DOCUMENTS_BLANK, DOCUMENTS_FILE };

typedef struct Options {
    const char *out, *key, *tokenizer;
    double val_fraction;
    int64_t shard_tokens;
    int format, documents, overwrite;
} Options;

// One input's documents, end to end in a nameless file: standard input has no size, and the cut needs one.
typedef struct Text {
    const char *name;
    FILE *stage;
    int64_t *start; // byte at which each document begins
    int64_t n_docs, room, n_bytes, n_empty;
    int open;       // the last document still grows
} Text;

// ---- documents ----------------------------------------------------------------------------------------------------

static void text_open(Text *t, const char *name, const char *dir) {
    *t = (Text){.name = name};
    char *path = str_format("%s/text.tmp.%ld", dir, (long)getpid());
    t->stage = fopen(path, "w+b");
    CHECK_DATA(t->stage, "%s: cannot write: %s", path, strerror(errno));
    remove(path);
    free(path);
}

static void text_close(Text *t) {
    fclose(t->stage);
    free(t->start);
}

static void text_begin(Text *t) {
    if (t->n_docs == t->room) {
        t->room = t->room ? 2 * t->room : 1024;
        t->start = realloc(t->start, SIZE(t->room, sizeof *t->start));
        CHECK_DATA(t->start, "%s: out of memory for a list of %" PRId64 " documents", t->name, t->room);
    }
    t->start[t->n_docs++] = t->n_bytes;
    t->open = 1;
}

static inline void text_byte(Text *t, int c) {
    if (!t->open) text_begin(t);
    putc_unlocked(c, t->stage);
    t->n_bytes++;
}

static void text_bytes(Text *t, const char *bytes, size_t n) {
    if (n == 0) return;
    if (!t->open) text_begin(t);
    fwrite(bytes, 1, n, t->stage);
    t->n_bytes += (int64_t)n;
}

// The rest of a document's text goes to a new one; an empty document leaves nothing behind.
static void text_end(Text *t) { t->open = 0; }

// ---- inputs -------------------------------------------------------------------------------------------------------

static void read_whole(Text *t, FILE *in) {
    char buf[1 << 16];
    for (size_t n; (n = fread(buf, 1, sizeof buf, in)) > 0;) text_bytes(t, buf, n);
}

typedef struct Marks {
    Text *text;
    int matched; // characters of the mark seen so far
    int newline; // a newline is held back: it belongs to the mark if one follows
    int after;   // just behind a mark: a newline belongs to it
} Marks;

static void marks_byte(Marks *m, int c) {
    int skip = m->after && c == '\n';
    m->after = 0;
    if (skip) return;
    if (m->newline) text_byte(m->text, '\n');
    m->newline = c == '\n';
    if (!m->newline) text_byte(m->text, c);
}

// Documents between marks <|endoftext|>. One newline directly before and one directly behind a mark belong to the mark; all
// other bytes are text, so that a file without marks is taken byte for byte.
static void read_marks(Text *t, FILE *in) {
    static const char mark[] = TOKENIZER_SEPARATOR_TEXT;
    const int len = (int)sizeof mark - 1;
    Marks m = {.text = t};
    for (int c; (c = getc_unlocked(in)) != EOF;) {
        // only the mark's first character is a '<', so a broken match can begin anew at c alone
        if (c != mark[m.matched] && m.matched) {
            for (int i = 0; i < m.matched; i++) marks_byte(&m, mark[i]);
            m.matched = 0;
        }
        if (c != mark[m.matched]) {
            marks_byte(&m, c);
        } else if (++m.matched == len) {
            m = (Marks){.text = t, .after = 1};
            text_end(t);
        }
    }
    for (int i = 0; i < m.matched; i++) marks_byte(&m, mark[i]);
    if (m.newline) text_byte(t, '\n');
}

// Documents between blank lines (white space counts as blank).
static void read_blank(Text *t, FILE *in) {
    char *line = NULL;
    size_t room = 0;
    for (ssize_t n; (n = getline(&line, &room, in)) >= 0;) {
        ssize_t i = 0;
        while (i < n && strchr(" \t\r\n\v\f", line[i]) && line[i]) i++;
        if (i == n) text_end(t);
        else text_bytes(t, line, (size_t)n);
    }
    free(line);
}

// A JSON object on each line; the string under `key` is a document.
static void read_jsonl(Text *t, FILE *in, const char *key) {
    char *line = NULL;
    size_t room = 0;
    int64_t at = 0;
    for (ssize_t n; (n = getline(&line, &room, in)) >= 0;) {
        at++;
        if ((size_t)n == strspn(line, " \t\r\n")) continue;
        json_error_t error;
        json_t *object = json_loadb(line, (size_t)n, JSON_ALLOW_NUL, &error);
        CHECK_DATA(object, "%s: line %" PRId64 " is no JSON: %s, column %d (hint: --format jsonl expects one object a line)", t->name,
                   at, error.text, error.column);
        json_t *value = json_object_get(object, key);
        CHECK_DATA(json_is_string(value),
                   "%s: line %" PRId64 " has no string under the key '%s' (hint: name the text's key with --key)", t->name, at, key);
        if (json_string_length(value) == 0) t->n_empty++;
        text_bytes(t, json_string_value(value), json_string_length(value));
        text_end(t);
        json_decref(object);
    }
    free(line);
}

static void read_input(Text *t, const Options *o) {
    int is_stdin = strcmp(t->name, "-") == 0;
    FILE *in = is_stdin ? stdin : fopen(t->name, "rb");
    if (is_stdin) t->name = "standard input";
    CHECK_DATA(in, "%s: cannot read: %s", t->name, strerror(errno));
    errno = 0;
    if (o->format == FORMAT_JSONL) read_jsonl(t, in, o->key);
    else if (o->documents == DOCUMENTS_MARK) read_marks(t, in);
    else if (o->documents == DOCUMENTS_BLANK) read_blank(t, in);
    else read_whole(t, in);
    CHECK_DATA(!ferror(in), "%s: cannot read: %s", t->name, strerror(errno));
    if (!is_stdin) fclose(in);
    CHECK_DATA(fflush(t->stage) == 0 && !ferror(t->stage), "%s: cannot keep a copy of %s: %s (hint: is the disk full?)", o->out,
               t->name, strerror(errno));
    CHECK_DATA(t->n_bytes > 0, "%s holds no text", t->name);
}

// ---- shards -------------------------------------------------------------------------------------------------------

// The first byte for validation. Refuses a text of which a fraction asked for is nothing.
static int64_t text_cut(const Text *t, double fraction) {
    if (fraction <= 0) return t->n_bytes;
    if (fraction >= 1) return 0;
    int64_t cut = (int64_t)((1 - fraction) * (double)t->n_bytes);
    CHECK_DATA(cut > 0 && cut < t->n_bytes,
               "%s has %" PRId64 " bytes: split at --val-fraction %g, a part is empty (hint: --val-fraction 0 makes training shards "
               "alone, 1 validation shards alone)", t->name, t->n_bytes, fraction);
    return cut;
}

static void put_part(ShardWriter *w, const Tokenizer *tok, const char *bytes, int64_t n) {
    enum { PIECE = 1 << 14 };
    int ids[PIECE]; // byte-level: a piece's tokens do not depend on its neighbours
    int separator = tokenizer_separator(tok);
    shard_put(w, &separator, 1);
    for (int64_t at = 0; at < n; at += PIECE) {
        size_t m = (size_t)(n - at < PIECE ? n - at : PIECE);
        shard_put(w, ids, tokenizer_encode(tok, ids, bytes + at, m));
    }
}

static void text_write(const Text *t, int64_t cut, const Tokenizer *tok, ShardWriter *train, ShardWriter *val) {
    char *bytes = mmap(NULL, (size_t)t->n_bytes, PROT_READ, MAP_SHARED, fileno(t->stage), 0);
    CHECK_DATA(bytes != MAP_FAILED, "%s: cannot map %" PRId64 " bytes: %s", t->name, t->n_bytes, strerror(errno));
    for (int64_t i = 0; i < t->n_docs; i++) {
        int64_t begin = t->start[i], end = i + 1 < t->n_docs ? t->start[i + 1] : t->n_bytes;
        int64_t middle = cut < begin ? begin : cut > end ? end : cut;
        if (middle > begin) put_part(train, tok, bytes + begin, middle - begin);
        if (end > middle) put_part(val, tok, bytes + middle, end - middle);
    }
    munmap(bytes, (size_t)t->n_bytes);
}

// Shards of an earlier run would be read together with the new ones.
static void old_shards(const char *dir, const char *prefix, int overwrite, int delete) {
    int n;
    char **list = shard_list(dir, prefix, &n);
    CHECK_USAGE(n == 0 || overwrite, "%s holds %s already, where new %s shards are to go (hint: --overwrite replaces them)", dir,
                list[0], prefix);
    for (int i = 0; i < n; i++) {
        if (delete) CHECK_DATA(remove(list[i]) == 0, "%s: cannot remove: %s", list[i], strerror(errno));
        free(list[i]);
    }
    free(list);
}

// PREFIX_NNNNNN.bin.tmp.PID of runs that ended before they could rename them; those of a running one are its own.
static void remove_leftovers(const char *dir, const char *prefix) {
    DIR *d = opendir(dir);
    CHECK_DATA(d, "%s: cannot read the folder: %s", dir, strerror(errno));
    char *format = str_format("%s_%%*[0-9].bin.tmp.%%9d%%n", prefix);
    for (struct dirent *e; (e = readdir(d));) {
        int pid = 0, end = 0;
        if (sscanf(e->d_name, format, &pid, &end) != 1 || e->d_name[end] || pid <= 0 || kill(pid, 0) == 0 || errno != ESRCH) continue;
        char *path = path_join(dir, e->d_name);
        CHECK_DATA(remove(path) == 0, "%s: cannot remove: %s", path, strerror(errno));
        free(path);
    }
    free(format);
    closedir(d);
}

static void finish(ShardWriter *w, const char *prefix, const Options *o) {
    int64_t n_tokens = shard_writer_tokens(w);
    if (n_tokens) old_shards(o->out, prefix, o->overwrite, 1);
    int n_shards = shard_writer_close(w);
    if (n_shards) printf("%s: %" PRId64 " tokens in %d shard%s\n", prefix, n_tokens, n_shards, n_shards == 1 ? "" : "s");
}

static int parse(Options *o, int argc, char **argv) {
    Flag flags[] = {
        {"out", FLAG_STRING, &o->out, .help = "folder for the shards, made if it is not there"},
        {"format", FLAG_CHOICE, &o->format, .choices = "text|jsonl", .help = "what the inputs are"},
        {"documents", FLAG_CHOICE, &o->documents, .choices = "endoftext|blank|file",
         .help = "text is cut at <|endoftext|>, at blank lines, or not at all"},
        {"key", FLAG_STRING, &o->key, .help = "key of the text in a line of JSON"},
        {"val-fraction", FLAG_DOUBLE, &o->val_fraction, 0, 1, .help = "part of each input's bytes, from its end, for validation"},
        {"shard-tokens", FLAG_INT, &o->shard_tokens, 0, SHARD_MAX_TOKENS,
         .help = "cut into shards of so many tokens, train_000000.bin ... (0: one file if it can be)"},
        {"tokenizer", FLAG_STRING, &o->tokenizer, .help = "bytes"},
        {"overwrite", FLAG_BOOL, &o->overwrite, .help = "replace the train and val shards that the folder holds"},
        {.name = NULL},
    };
    int n = flags_parse(flags, "prepare", "Text to token shards: prepare --out DIR [flags] INPUT... (- is standard input)", argc,
                        argv);
    CHECK_USAGE(n > 0, "no input is named (hint: build/prepare --out DIR FILE..., or - for standard input)");
    CHECK_USAGE(o->out && *o->out, "no folder is named (hint: --out DIR)");
    return n;
}

int main(int argc, char **argv) {
    Options o = {.out = "", .key = "text", .tokenizer = "bytes", .val_fraction = 0.1};
    int n_inputs = parse(&o, argc, argv);
    Tokenizer *tok = tokenizer_open(o.tokenizer);
    dir_make(o.out);
    if (o.val_fraction < 1) old_shards(o.out, "train", o.overwrite, 0);
    if (o.val_fraction > 0) old_shards(o.out, "val", o.overwrite, 0);
    remove_leftovers(o.out, "train");
    remove_leftovers(o.out, "val");
    ShardWriter *train = shard_writer_open(o.out, "train", o.shard_tokens, tokenizer_vocab(tok), tokenizer_separator(tok));
    ShardWriter *val = shard_writer_open(o.out, "val", o.shard_tokens, tokenizer_vocab(tok), tokenizer_separator(tok));
    for (int i = 1; i <= n_inputs; i++) {
        Text t;
        text_open(&t, argv[i], o.out);
        read_input(&t, &o);
        int64_t cut = text_cut(&t, o.val_fraction);
        text_write(&t, cut, tok, train, val);
        printf("%s: %" PRId64 " document%s, %" PRId64 " bytes, validation from byte %" PRId64, t.name, t.n_docs,
               t.n_docs == 1 ? "" : "s", t.n_bytes, cut);
        if (t.n_empty) printf(", %" PRId64 " empty document%s skipped", t.n_empty, t.n_empty == 1 ? "" : "s");
        printf("\n");
        text_close(&t);
    }
    finish(val, "val", &o);
    finish(train, "train", &o);
    tokenizer_close(tok);
    stdout_check();
    return STATUS_OK;
}
