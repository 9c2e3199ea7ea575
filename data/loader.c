#include "data/loader.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "data/shard.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include "kernels/rng.h"

struct Loader {
    Shard *shard;
    int64_t *first_window; // (n_shards+1) windows before each shard; the last entry is all of them
    int n_shards, V, T;
    uint64_t seed, stream;
    int64_t n_tokens;
};

// The command that makes the shards of a folder: data/NAME comes from the download script, everything else from text.
static _Noreturn void die_without_shards(const char *spec, const char *prefix, const char *found) {
    const char *name = strncmp(spec, "./", 2) == 0 ? spec + 2 : spec;
    char *hint = strncmp(name, "data/", 5) == 0 && name[5] && !strchr(name + 5, '/')
                     ? str_format("scripts/get_data.sh %s", name + 5)
                     : str_format("build/prepare --out %s TEXT_FILE", spec);
    die(STATUS_DATA, __FILE__, __LINE__, "%s %s, expected token shards named %s*.bin (hint: run %s)", spec, found, prefix, hint);
}

static char **spec_paths(const char *spec, const char *prefix, int *n) {
    if (!file_is_dir(spec)) {
        if (file_size(spec) < 0) die_without_shards(spec, prefix, "does not exist");
        char **one = host_alloc(sizeof *one);
        one[0] = str_format("%s", spec);
        *n = 1;
        return one;
    }
    char **list = shard_list(spec, prefix, n);
    if (*n == 0) die_without_shards(spec, prefix, "holds none");
    return list;
}

// Where the header does not say it: bytes or GPT-2 in a uint16 shard, as the vocabulary allows; Llama 3's in a uint32 one.
static int separator_guess(const Shard *s, int V) {
    if (s->token_bytes == 4) return 128000;
    return V > 50256 ? 50256 : 256;
}

Loader *loader_open(const char *spec, const char *prefix, int V, int T, uint64_t seed) {
    CHECK_USAGE(T >= 1, "a window has %d tokens, expected at least 1", T);
    CHECK_USAGE(V >= 1, "the model's vocabulary is %d, expected at least 1", V);
    Loader *l = host_alloc(sizeof *l);
    *l = (Loader){.V = V, .T = T, .seed = seed, .stream = rng_name("data.order")};
    char **path = spec_paths(spec, prefix, &l->n_shards);
    l->shard = host_alloc(SIZE(l->n_shards, sizeof *l->shard));
    l->first_window = host_alloc(SIZE(l->n_shards + 1, sizeof *l->first_window));
    for (int i = 0; i < l->n_shards; i++) {
        Shard *s = &l->shard[i];
        *s = shard_open(path[i]);
        free(path[i]);
        CHECK_DATA(s->vocab <= V, "shard %s was made with a vocabulary of %d, the model's is %d (hint: another tokenizer?)", s->path,
                   s->vocab, V);
        if (s->separator < 0) s->separator = separator_guess(s, V);
        l->n_tokens += s->n_tokens;
        l->first_window[i + 1] = l->first_window[i] + (s->n_tokens > 0 ? (s->n_tokens - 1) / T : 0);
    }
    free(path);
    CHECK_DATA(loader_windows(l) > 0,
               "%s (%d shard%s, %" PRId64 " tokens) holds no window of %d tokens and the one behind them (hint: use a "
               "shorter --seq or more text)", spec, l->n_shards, l->n_shards == 1 ? "" : "s", l->n_tokens, T);
    return l;
}

void loader_close(Loader *l) {
    for (int i = 0; i < l->n_shards; i++) shard_close(&l->shard[i]);
    free(l->shard);
    free(l->first_window);
    free(l);
}

int64_t loader_windows(const Loader *l) { return l->first_window[l->n_shards]; }

int64_t loader_tokens(const Loader *l) { return l->n_tokens; }

void loader_sample(const Loader *l, int64_t i, int *tok, int *target, int *first) {
    assert(i >= 0);
    int64_t n = loader_windows(l), epoch = i / n;
    uint64_t w = rng_permute(l->seed, l->stream + (uint64_t)epoch, (uint64_t)(i % n), (uint64_t)n);
    loader_window(l, (int64_t)w, tok, target, first);
}

void loader_window(const Loader *l, int64_t w, int *tok, int *target, int *first) {
    assert(w >= 0 && w < loader_windows(l));
    int lo = 0, hi = l->n_shards; // the last shard with first_window <= w: shards without a window are passed over
    while (hi - lo > 1) {
        int mid = lo + (hi - lo) / 2;
        if (l->first_window[mid] <= w) lo = mid;
        else hi = mid;
    }
    const Shard *s = &l->shard[lo];
    int64_t at = (w - l->first_window[lo]) * l->T;
    shard_read(s, tok, at, l->T, l->V);
    shard_read(s, target, at + 1, l->T, l->V);
    if (!first) return;
    for (int t = 0, begin = 0; t < l->T; t++) {
        if (tok[t] == s->separator) begin = t;
        first[t] = begin;
    }
}
