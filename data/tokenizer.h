// Text to tokens and back. Kind "bytes": ids 0..255 are the bytes themselves, 256 is the separator <|endoftext|> that
// begins each document; vocabulary 257, no file, every string of bytes makes the round trip.
#ifndef MOE_TOKENIZER_H
#define MOE_TOKENIZER_H
#include <stddef.h>

#define TOKENIZER_SEPARATOR_TEXT "<|endoftext|>"

typedef struct Tokenizer Tokenizer;

Tokenizer *tokenizer_open(const char *kind);          // "bytes"; another kind: STATUS_USAGE
void tokenizer_close(Tokenizer *t);
const char *tokenizer_kind(const Tokenizer *t);
int tokenizer_vocab(const Tokenizer *t);
int tokenizer_separator(const Tokenizer *t);
// ids (n, room for one per byte) of text (n bytes, any bytes, zeros too); returns how many. Text that spells the separator
// is text: only the caller writes separators.
size_t tokenizer_encode(const Tokenizer *t, int *ids, const char *text, size_t n);
// The bytes of one token (*n of them, not NUL-terminated), valid until tokenizer_close; the separator gives its text.
// An id outside the vocabulary: STATUS_DATA.
const char *tokenizer_piece(const Tokenizer *t, int id, size_t *n);
// The bytes of n tokens, *bytes of them and a NUL behind; free() it.
char *tokenizer_decode(const Tokenizer *t, const int *ids, size_t n, size_t *bytes);
// Writes tokenizer.json and tokenizer_config.json into dir, for Hugging Face's tokenizers and transformers: the same ids.
void tokenizer_write(const Tokenizer *t, const char *dir);
#endif
