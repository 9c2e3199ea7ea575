#include "data/shard.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/check.h"
#include "kernels/files.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "shards are little-endian and read in place");

enum {
    HEADER_WORDS = 256,
    HEADER_BYTES = HEADER_WORDS * 4,
    MAGIC_U16 = 20240520,  // GPT-2 and bytes
    MAGIC_U32 = 20240801,  // Llama 3
    MAGIC_EVAL = 20240522, // llm.c's multiple-choice files, no stream of tokens
    WORD_TAG = 16,
    WORD_VOCAB,
    WORD_SEPARATOR,
    TAG = 0x2E656F6D, // "moe."
};

// ---- reading ------------------------------------------------------------------------------------------------------

// What a file with a wrong magic most likely is; NULL when there is nothing to say.
static const char *shard_guess(const char *head, size_t n) {
    static const struct { const char *begins, *is; } known[] = {
        {"<", "a web page: the download failed; fetch it again with scripts/get_data.sh"},
        {"version https://git-lfs", "a Git LFS pointer, not the file itself; fetch the file it points to"},
        {"PAR1", "a parquet file: convert it to JSON lines or text first, then build/prepare"},
        {"\x1f\x8b", "gzip-compressed: unpack it first"},
        {"{", "JSON: make shards of it with build/prepare --format jsonl"},
    };
    size_t skip = 0;
    while (skip < n && (head[skip] == ' ' || head[skip] == '\n' || head[skip] == '\r' || head[skip] == '\t')) skip++;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        size_t len = strlen(known[i].begins);
        if (n - skip >= len && memcmp(head + skip, known[i].begins, len) == 0) return known[i].is;
    }
    int text = n > 0;
    for (size_t i = 0; i < n && i < 64; i++) text &= (head[i] >= 32 && head[i] < 127) || (head[i] >= '\t' && head[i] <= '\r');
    return text ? "plain text: make shards of it with build/prepare" : NULL;
}

static void check_magic(const Shard *s, const uint32_t *word) {
    size_t have = s->map_bytes < HEADER_BYTES ? s->map_bytes : HEADER_BYTES;
    uint32_t magic = 0, swapped;
    if (have >= 4) magic = word[0];
    swapped = __builtin_bswap32(magic);
    if (have >= 4 && (magic == MAGIC_U16 || magic == MAGIC_U32)) return;
    const char *guess = shard_guess((const char *)word, have);
    if (magic == MAGIC_EVAL) guess = "a multiple-choice evaluation file of llm.c, which holds no stream of tokens";
    if (swapped == MAGIC_U16 || swapped == MAGIC_U32) guess = "a shard of the other byte order: write it little-endian";
    die(STATUS_DATA, __FILE__, __LINE__,
        "%s (%zu bytes) is no token shard: its magic (word 0) is %" PRIu32 ", expected %d (uint16 tokens) or %d (uint32 tokens)"
        "%s%s%s", s->path, s->map_bytes, magic, MAGIC_U16, MAGIC_U32, guess ? " (hint: it looks like " : "", guess ? guess : "",
        guess ? ")" : "");
}

static void check_header(Shard *s) {
    const uint32_t *word = s->map;
    check_magic(s, word);
    CHECK_DATA(s->map_bytes >= HEADER_BYTES,
               "%s is truncated: it has %zu bytes, a shard's header alone has %d (hint: fetch or make it again)", s->path,
               s->map_bytes, HEADER_BYTES);
    int wide = word[0] == MAGIC_U32, version = (int)word[1], newest = wide ? 7 : 1;
    CHECK_DATA(version == newest || version == 1,
               "%s (%zu bytes) has version %d (word 1) of magic %" PRIu32 ", expected %s%s", s->path, s->map_bytes, version,
               word[0], wide ? "7 or 1" : "1", version > newest ? " (hint: it is newer than this program; update the program)" : "");
    s->token_bytes = wide ? 4 : 2;
    s->n_tokens = word[2];
    uint64_t expected = HEADER_BYTES + (uint64_t)s->n_tokens * (uint64_t)s->token_bytes;
    CHECK_DATA(s->map_bytes >= expected,
               "%s is truncated: its token count (word 2) is %" PRId64 ", so it should have %" PRIu64 " bytes, but it has %zu "
               "(hint: fetch or make it again)", s->path, s->n_tokens, expected, s->map_bytes);
    CHECK_DATA(s->map_bytes == expected,
               "%s has %" PRIu64 " bytes behind its last token: its token count (word 2) is %" PRId64 ", so it should have %" PRIu64
               " bytes, but it has %zu (hint: the count or the file is damaged; fetch or make it again)",
               s->path, s->map_bytes - expected, s->n_tokens, expected, s->map_bytes);
    s->vocab = 0;
    s->separator = -1;
    if (word[WORD_TAG] != TAG) return;
    uint32_t vocab = word[WORD_VOCAB], separator = word[WORD_SEPARATOR];
    CHECK_DATA(vocab >= 1 && vocab <= (wide ? (uint32_t)INT32_MAX : 65536u),
               "%s (%zu bytes) has vocabulary %" PRIu32 " (word %d), expected 1 to %s (hint: the header is damaged; make it again)",
               s->path, s->map_bytes, vocab, WORD_VOCAB, wide ? "2147483647" : "65536");
    CHECK_DATA(separator < vocab, "%s (%zu bytes) has separator token %" PRIu32 " (word %d), its vocabulary is %" PRIu32
               " (hint: the header is damaged; make it again)", s->path, s->map_bytes, separator, WORD_SEPARATOR, vocab);
    s->vocab = (int)vocab;
    s->separator = (int)separator;
}

Shard shard_open(const char *path) {
    Shard s = {.path = str_format("%s", path)};
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK_DATA(fd >= 0, "%s: cannot open the shard: %s", path, strerror(errno));
    struct stat st;
    CHECK_DATA(fstat(fd, &st) == 0, "%s: %s", path, strerror(errno));
    CHECK_DATA(S_ISREG(st.st_mode), "%s is no regular file, expected a token shard (hint: name a .bin file or a folder of them)",
               path);
    CHECK_DATA(st.st_size > 0, "%s is truncated: it has 0 bytes, a shard's header alone has %d (hint: fetch or make it again)",
               path, HEADER_BYTES);
    CHECK_DATA((uint64_t)st.st_size <= SIZE_MAX, "%s has %jd bytes, more than can be addressed here", path, (intmax_t)st.st_size);
    s.map_bytes = (size_t)st.st_size;
    s.map = mmap(NULL, s.map_bytes, PROT_READ, MAP_SHARED, fd, 0);
    CHECK_DATA(s.map != MAP_FAILED, "%s (%zu bytes): cannot map it into memory: %s", path, s.map_bytes, strerror(errno));
    close(fd);
    check_header(&s);
    return s;
}

void shard_close(Shard *s) {
    munmap(s->map, s->map_bytes);
    free(s->path);
    *s = (Shard){0};
}

void shard_read(const Shard *s, int *out, int64_t at, int n, int V) {
    const char *data = (const char *)s->map + HEADER_BYTES;
    uint32_t limit = (uint32_t)V;
    int bad = -1;
    if (s->token_bytes == 2) {
        const uint16_t *tok = (const uint16_t *)(const void *)data + at;
        for (int i = 0; i < n; i++) {
            if (tok[i] >= limit && bad < 0) bad = i;
            out[i] = tok[i];
        }
    } else {
        const uint32_t *tok = (const uint32_t *)(const void *)data + at;
        for (int i = 0; i < n; i++) {
            if (tok[i] >= limit && bad < 0) bad = i;
            out[i] = (int)tok[i];
        }
    }
    CHECK_DATA(bad < 0,
               "shard %s (%zu bytes) holds token %" PRIu32 " at %" PRId64 ", the model's vocabulary is %d (hint: was it made with "
               "another tokenizer?)", s->path, s->map_bytes, (uint32_t)out[bad], at + bad, V);
}

// ---- writing ------------------------------------------------------------------------------------------------------

struct ShardWriter {
    char *dir, *prefix;
    FILE *file;       // the shard being written, NULL before its first token
    char *tmp;        // its temporary name
    char **done;      // temporary names of all shards so far
    int n_done, numbered;
    int64_t limit, in_shard, total;
    int vocab, separator;
};

ShardWriter *shard_writer_open(const char *dir, const char *prefix, int64_t limit, int vocab, int separator) {
    CHECK_USAGE(limit >= 0 && limit <= SHARD_MAX_TOKENS, "a shard's limit is %" PRId64 " tokens, expected 0 (none) to %d", limit,
                SHARD_MAX_TOKENS);
    CHECK_USAGE(vocab >= 1 && vocab <= 65536, "a vocabulary of %d does not fit uint16 tokens, expected 1 to 65536", vocab);
    ShardWriter *w = host_alloc(sizeof *w);
    *w = (ShardWriter){.dir = str_format("%s", dir), .prefix = str_format("%s", prefix), .limit = limit ? limit : SHARD_MAX_TOKENS,
                       .numbered = limit > 0, .vocab = vocab, .separator = separator};
    return w;
}

static void shard_begin(ShardWriter *w) {
    // the process id keeps two runs that write to one folder apart
    w->tmp = str_format("%s/%s_%06d.bin.tmp.%ld", w->dir, w->prefix, w->n_done, (long)getpid());
    w->file = fopen(w->tmp, "wb");
    CHECK_DATA(w->file, "%s: cannot write: %s", w->tmp, strerror(errno));
    static const uint32_t blank[HEADER_WORDS];
    CHECK_DATA(fwrite(blank, sizeof blank, 1, w->file) == 1, "%s: cannot write: %s", w->tmp, strerror(errno));
}

static void shard_end(ShardWriter *w) {
    uint32_t word[HEADER_WORDS] = {MAGIC_U16, 1, (uint32_t)w->in_shard};
    word[WORD_TAG] = TAG;
    word[WORD_VOCAB] = (uint32_t)w->vocab;
    word[WORD_SEPARATOR] = (uint32_t)w->separator;
    int good = fseeko(w->file, 0, SEEK_SET) == 0 && fwrite(word, sizeof word, 1, w->file) == 1 && fflush(w->file) == 0 &&
               fsync(fileno(w->file)) == 0;
    CHECK_DATA(fclose(w->file) == 0 && good, "%s: cannot write: %s (hint: is the disk full?)", w->tmp, strerror(errno));
    w->done = realloc(w->done, SIZE(w->n_done + 1, sizeof *w->done));
    CHECK_DATA(w->done, "out of memory for a list of %d shards", w->n_done + 1);
    w->done[w->n_done++] = w->tmp;
    w->file = NULL;
    w->in_shard = 0;
}

void shard_put(ShardWriter *w, const int *tok, size_t n) {
    uint16_t buf[4096];
    for (size_t i = 0; i < n;) {
        if (w->file && w->in_shard == w->limit) shard_end(w);
        if (!w->file) shard_begin(w);
        size_t m = sizeof buf / sizeof *buf;
        if (m > n - i) m = n - i;
        if ((int64_t)m > w->limit - w->in_shard) m = (size_t)(w->limit - w->in_shard);
        for (size_t j = 0; j < m; j++) {
            CHECK_DATA(tok[i + j] >= 0 && tok[i + j] < w->vocab, "token %d to be written to %s, its vocabulary is %d", tok[i + j],
                       w->tmp, w->vocab);
            buf[j] = (uint16_t)tok[i + j];
        }
        CHECK_DATA(fwrite(buf, 2, m, w->file) == m, "%s: cannot write: %s (hint: is the disk full?)", w->tmp, strerror(errno));
        i += m;
        w->in_shard += (int64_t)m;
        w->total += (int64_t)m;
    }
}

int64_t shard_writer_tokens(const ShardWriter *w) { return w->total; }

int shard_writer_close(ShardWriter *w) {
    if (w->file) shard_end(w);
    int n = w->n_done, numbered = w->numbered || n > 1;
    for (int i = 0; i < n; i++) {
        char *name = numbered ? str_format("%s/%s_%06d.bin", w->dir, w->prefix, i) : str_format("%s/%s.bin", w->dir, w->prefix);
        CHECK_DATA(rename(w->done[i], name) == 0, "%s: cannot rename %s: %s", name, w->done[i], strerror(errno));
        free(name);
        free(w->done[i]);
    }
    if (n) dir_sync(w->dir);
    free(w->done);
    free(w->dir);
    free(w->prefix);
    free(w);
    return n;
}

// ---- folders ------------------------------------------------------------------------------------------------------

static int name_matches(const char *name, const char *prefix) {
    size_t len = strlen(name), head = strlen(prefix);
    if (len < head + 4 || strcmp(name + len - 4, ".bin") != 0) return 0;
    if (strncmp(name, prefix, head) == 0) return 1;
    for (const char *p = name; (p = strchr(p, '_')); p++)
        if (strncmp(p + 1, prefix, head) == 0) return 1;
    return 0;
}

static int name_order(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

char **shard_list(const char *dir, const char *prefix, int *n) {
    DIR *d = opendir(dir);
    CHECK_DATA(d, "%s: cannot read the folder: %s", dir, strerror(errno));
    char **list = NULL;
    *n = 0;
    for (struct dirent *e; (e = readdir(d));) {
        if (!name_matches(e->d_name, prefix)) continue;
        list = realloc(list, SIZE(*n + 1, sizeof *list));
        CHECK_DATA(list, "out of memory for the names in %s", dir);
        list[(*n)++] = path_join(dir, e->d_name);
    }
    closedir(d);
    if (*n) qsort(list, (size_t)*n, sizeof *list, name_order);
    return list;
}
