// Token shards: llm.c's .bin files. 256 little-endian int32 words, then the tokens; the file's size fits the header exactly.
//
//   word 0, 1  magic and version: 20240520 v1 = uint16 tokens (bytes, GPT-2); 20240801 v7 or v1 = uint32 tokens (Llama 3)
//   word 2     number of tokens, read as unsigned; we write at most 2^31 - 1, as far as other readers count
//   word 16-18 ours: the tag "moe." and, only where it stands, the vocabulary and the separator token; elsewhere unused
//
// A file that is no sound shard dies with STATUS_DATA: its name, its size, the field, what was found and expected.
#ifndef MOE_SHARD_H
#define MOE_SHARD_H
#include <stddef.h>
#include <stdint.h>

#define SHARD_MAX_TOKENS INT32_MAX // what the writer puts into one file

typedef struct Shard {
    char *path;
    void *map;         // the whole file, read-only
    size_t map_bytes;
    int64_t n_tokens;
    int token_bytes;   // 2 or 4
    int vocab;         // of the tokenizer that made it; 0 = the header does not say
    int separator;     // token that begins each document; -1 = the header does not say
} Shard;

Shard shard_open(const char *path);
void shard_close(Shard *s);
// out[i] = token at + i, 0 <= i < n; a token >= V dies with STATUS_DATA. The caller stays within n_tokens.
void shard_read(const Shard *s, int *out, int64_t at, int n, int V);

// Writes DIR/PREFIX.bin, or DIR/PREFIX_000000.bin, ... where `limit` > 0 or more than SHARD_MAX_TOKENS tokens come; a shard
// holds at most `limit` tokens (0 = SHARD_MAX_TOKENS). Files carry a temporary name until shard_writer_close renames them.
typedef struct ShardWriter ShardWriter;
ShardWriter *shard_writer_open(const char *dir, const char *prefix, int64_t limit, int vocab, int separator); // vocab <= 65536
void shard_put(ShardWriter *w, const int *tok, size_t n);
int64_t shard_writer_tokens(const ShardWriter *w);
int shard_writer_close(ShardWriter *w); // returns the number of shards; none is written without tokens

// Names (sorted, each with its folder) of a folder's shards: PREFIX*.bin and *_PREFIX*.bin. Free each and the list.
char **shard_list(const char *dir, const char *prefix, int *n);
#endif
