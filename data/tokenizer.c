#include "data/tokenizer.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/check.h"
#include "kernels/files.h"

enum { BYTES = 256, SEPARATOR = 256, VOCAB = 257 };

struct Tokenizer {
    char byte[BYTES]; // byte[i] = i: what tokenizer_piece points into
};

Tokenizer *tokenizer_open(const char *kind) {
    CHECK_USAGE(strcmp(kind, "bytes") == 0, "tokenizer '%s' is not known, expected 'bytes'", kind);
    Tokenizer *t = host_alloc(sizeof *t);
    for (int i = 0; i < BYTES; i++) t->byte[i] = (char)(unsigned char)i;
    return t;
}

void tokenizer_close(Tokenizer *t) { free(t); }

// Only one kind so far: the handle is asked for all the same, so that callers need not change when there are more.
const char *tokenizer_kind(const Tokenizer *t) { (void)t; return "bytes"; }
int tokenizer_vocab(const Tokenizer *t) { (void)t; return VOCAB; }
int tokenizer_separator(const Tokenizer *t) { (void)t; return SEPARATOR; }

size_t tokenizer_encode(const Tokenizer *t, int *ids, const char *text, size_t n) {
    (void)t;
    for (size_t i = 0; i < n; i++) ids[i] = (unsigned char)text[i];
    return n;
}

const char *tokenizer_piece(const Tokenizer *t, int id, size_t *n) {
    CHECK_DATA(id >= 0 && id < VOCAB,
               "token %d to be decoded, the byte-level vocabulary is %d (hint: was the model trained with another tokenizer?)", id,
               VOCAB);
    if (id == SEPARATOR) {
        *n = strlen(TOKENIZER_SEPARATOR_TEXT);
        return TOKENIZER_SEPARATOR_TEXT;
    }
    *n = 1;
    return &t->byte[id];
}

char *tokenizer_decode(const Tokenizer *t, const int *ids, size_t n, size_t *bytes) {
    size_t total = 0, len;
    for (size_t i = 0; i < n; i++) {
        tokenizer_piece(t, ids[i], &len);
        total += len;
    }
    char *text = host_alloc(total + 1), *p = text;
    for (size_t i = 0; i < n; i++) {
        const char *piece = tokenizer_piece(t, ids[i], &len);
        memcpy(p, piece, len);
        p += len;
    }
    *bytes = total;
    return text;
}

// ---- for other tools ----------------------------------------------------------------------------------------------

// The ByteLevel convention of Hugging Face's tokenizers: the printable characters of Latin-1 stand for themselves, the other
// 68 bytes, in ascending order, for the code points from 256 on. Writes the UTF-8 of byte b's character.
static void byte_char(char out[3], int b) {
    int code = 0;
    for (int i = 0, next = 256; i <= b; i++) {
        int printable = (i >= 33 && i <= 126) || (i >= 161 && i <= 172) || (i >= 174 && i <= 255);
        code = printable ? i : next++;
    }
    memset(out, 0, 3);
    if (code < 128) {
        out[0] = (char)code;
    } else {
        out[0] = (char)(0xC0 | code >> 6);
        out[1] = (char)(0x80 | (code & 63));
    }
}

static json_t *json_checked(json_t *value, const char *what, const json_error_t *error) {
    CHECK_DATA(value, "cannot build %s: %s", what, error->text);
    return value;
}

static json_t *byte_level(void) {
    json_error_t error;
    json_t *value = json_pack_ex(&error, 0, "{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1,
                                 "use_regex", 0);
    return json_checked(value, "tokenizer.json", &error);
}

static void write_json(const char *dir, const char *name, json_t *value) {
    char *text = json_dumps(value, JSON_INDENT(2)), *path = path_join(dir, name);
    CHECK_DATA(text, "%s: cannot be put into JSON", path);
    file_write(path, text, strlen(text));
    free(path);
    free(text);
    json_decref(value);
}

void tokenizer_write(const Tokenizer *t, const char *dir) {
    (void)t;
    json_error_t error;
    json_t *vocab = json_object();
    for (int b = 0; b < BYTES; b++) {
        char key[3];
        byte_char(key, b);
        CHECK_DATA(json_object_set_new(vocab, key, json_integer(b)) == 0, "cannot build tokenizer.json: byte %d", b);
    }
    json_t *special = json_pack_ex(&error, 0, "{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", SEPARATOR, "content",
                                   TOKENIZER_SEPARATOR_TEXT, "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special",
                                   1);
    // a BPE without merges leaves each byte a token of its own
    json_t *model = json_pack_ex(&error, 0, "{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:[]}", "type", "BPE", "dropout",
                                 "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0,
                                 "ignore_merges", 0, "vocab", vocab, "merges");
    json_checked(special, "tokenizer.json", &error);
    json_checked(model, "tokenizer.json", &error);
    json_t *all = json_pack_ex(&error, 0, "{s:s, s:n, s:n, s:[o], s:n, s:o, s:n, s:o, s:o}", "version", "1.0", "truncation",
                               "padding", "added_tokens", special, "normalizer", "pre_tokenizer", byte_level(), "post_processor",
                               "decoder", byte_level(), "model", model);
    write_json(dir, "tokenizer.json", json_checked(all, "tokenizer.json", &error));
    json_t *config = json_pack_ex(&error, 0, "{s:s, s:s, s:s, s:n, s:b, s:b}", "tokenizer_class", "PreTrainedTokenizerFast",
                                  "bos_token", TOKENIZER_SEPARATOR_TEXT, "eos_token", TOKENIZER_SEPARATOR_TEXT, "unk_token",
                                  "add_prefix_space", 0, "clean_up_tokenization_spaces", 0);
    write_json(dir, "tokenizer_config.json", json_checked(config, "tokenizer_config.json", &error));
}
