// Shards and loader. The shards read here are written by hand, word by word, not by the code under test.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// cmocka wants the above first
#include <cmocka.h>

#include "data/loader.h"
#include "data/shard.h"
#include "kernels/files.h"
#include "tests/common/child.h"

enum { U16 = 20240520, U32 = 20240801, ANY_V = 1 << 30 };

// ---- shards by hand -----------------------------------------------------------------------------------------------

static void write_bytes(const char *path, const void *head, size_t n_head, const void *tail, size_t n_tail) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    if (n_head) assert_int_equal(fwrite(head, 1, n_head, f), n_head);
    if (n_tail) assert_int_equal(fwrite(tail, 1, n_tail, f), n_tail);
    assert_int_equal(fclose(f), 0);
}

// A uint32 shard of n tokens from, from+1, ...: a token names its place in the data set.
static void write_u32(const char *path, int version, uint32_t from, uint32_t n) {
    uint32_t head[256] = {U32, (uint32_t)version, n}, *tok = malloc(4 * (size_t)n + 4);
    for (uint32_t i = 0; i < n; i++) tok[i] = from + i;
    write_bytes(path, head, sizeof head, tok, 4 * (size_t)n);
    free(tok);
}

static void write_u16(const char *path, const uint16_t *tok, uint32_t n) {
    uint32_t head[256] = {U16, 1, n};
    write_bytes(path, head, sizeof head, tok, 2 * (size_t)n);
}

// Five unequal shards, one empty and one too short for a window of 7; the 1000s tell them apart. 3+0+28+0+9 windows.
enum { T = 7, N_WINDOWS = 40 };
static const uint32_t shard_tokens[] = {23, 0, 200, 7, 64};

static char *unequal_set(void) {
    char *dir = temp_dir(), name[64];
    for (int i = 0; i < 5; i++) {
        snprintf(name, sizeof name, "train_%06d.bin", i);
        char *path = path_join(dir, name);
        write_u32(path, i % 2 ? 1 : 7, (uint32_t)(1000 * i), shard_tokens[i]);
        free(path);
    }
    char *other = path_join(dir, "val.bin"), *stray = path_join(dir, "train_000009.bin.tmp.77");
    write_u32(other, 7, 500000, 100);
    write_bytes(stray, "half", 4, "", 0);
    free(other);
    free(stray);
    return dir;
}

// Index 0..39 of the window that begins with this token, in the order of the files; -1 = no window does.
static int window_of(int tok) {
    int before = 0;
    for (int i = 0; i < 5; i++) {
        int n = shard_tokens[i] ? (int)(shard_tokens[i] - 1) / T : 0, at = tok - 1000 * i;
        if (at >= 0 && at < n * T && at % T == 0) return before + at / T;
        before += n;
    }
    return -1;
}

static int sample_window(const Loader *l, int64_t i) {
    int tok[T], target[T];
    loader_sample(l, i, tok, target, NULL);
    for (int t = 0; t < T; t++) {
        assert_int_equal(tok[t], tok[0] + t);
        assert_int_equal(target[t], tok[t] + 1);
    }
    return window_of(tok[0]);
}

// ---- order --------------------------------------------------------------------------------------------------------

static void test_windows_in_file_order(void **state) {
    (void)state;
    char *dir = unequal_set();
    Loader *l = loader_open(dir, "train", ANY_V, T, 1);
    assert_int_equal(loader_windows(l), N_WINDOWS);
    assert_int_equal(loader_tokens(l), 23 + 200 + 7 + 64);
    for (int w = 0; w < N_WINDOWS; w++) {
        int tok[T], target[T];
        loader_window(l, w, tok, target, NULL);
        assert_int_equal(window_of(tok[0]), w);
        for (int t = 0; t < T; t++) {
            assert_int_equal(tok[t], tok[0] + t);
            assert_int_equal(target[t], tok[t] + 1);
        }
    }
    loader_close(l);
    l = loader_open(dir, "val", ANY_V, T, 1);
    assert_int_equal(loader_windows(l), 99 / T);
    loader_close(l);
    temp_remove(dir);
}

// R ranks with loaders of their own share steps of B samples; three epochs, which 24 does not divide. Each window is seen
// exactly once per epoch, and what each sample is does not depend on R.
static void test_each_window_once(void **state) {
    (void)state;
    enum { B = 24, EPOCHS = 3, N_STEPS = EPOCHS * N_WINDOWS / B };
    char *dir = unequal_set();
    int seen[3][EPOCHS * N_WINDOWS];
    for (int k = 0; k < 3; k++) {
        int R = 1 << k;
        for (int r = 0; r < R; r++) {
            Loader *l = loader_open(dir, "train", ANY_V, T, 5);
            for (int s = 0; s < N_STEPS; s++)
                for (int b = r * B / R; b < (r + 1) * B / R; b++) seen[k][s * B + b] = sample_window(l, s * B + b);
            loader_close(l);
        }
        assert_memory_equal(seen[k], seen[0], sizeof seen[0]);
    }
    int moved = 0, differ = 0;
    for (int e = 0; e < EPOCHS; e++) {
        int times[N_WINDOWS] = {0};
        for (int i = 0; i < N_WINDOWS; i++) {
            int w = seen[0][e * N_WINDOWS + i];
            assert_in_range(w, 0, N_WINDOWS - 1);
            times[w]++;
            moved += w != i;
            if (e) differ += w != seen[0][(e - 1) * N_WINDOWS + i];
        }
        for (int w = 0; w < N_WINDOWS; w++) assert_int_equal(times[w], 1);
    }
    assert_true(moved > EPOCHS * N_WINDOWS / 2);         // a shuffle leaves about one of 40 in place
    assert_true(differ > (EPOCHS - 1) * N_WINDOWS / 2);  // and epochs have orders of their own
    temp_remove(dir);
}

static void test_seed_and_resume(void **state) {
    (void)state;
    enum { N = 3 * N_WINDOWS };
    char *dir = unequal_set();
    int order[N], other = 0;
    Loader *l = loader_open(dir, "train", ANY_V, T, 11);
    for (int i = 0; i < N; i++) order[i] = sample_window(l, i);
    loader_close(l);
    for (int from = 0; from < N; from++) { // resume at every step: a new loader, the step's number, nothing else
        l = loader_open(dir, "train", ANY_V, T, 11);
        for (int i = from; i < from + 3 && i < N; i++) assert_int_equal(sample_window(l, i), order[i]);
        loader_close(l);
    }
    l = loader_open(dir, "train", ANY_V, T, 12);
    for (int i = 0; i < N; i++) other += sample_window(l, i) != order[i];
    loader_close(l);
    assert_true(other > N / 2);
    temp_remove(dir);
}

// ---- formats ------------------------------------------------------------------------------------------------------

static void test_names(void **state) {
    (void)state;
    static const char *const names[] = {"edu_fineweb_train_000002.bin", "edu_fineweb_train_000001.bin", "strain.bin", "train.txt",
                                        "edu_fineweb_val_000000.bin", "retrain_1.bin.part"};
    char *dir = temp_dir();
    for (int i = 0; i < 6; i++) {
        char *path = path_join(dir, names[i]);
        write_bytes(path, "x", 1, "", 0);
        free(path);
    }
    int n;
    char **list = shard_list(dir, "train", &n);
    assert_int_equal(n, 2);
    assert_non_null(strstr(list[0], "edu_fineweb_train_000001.bin"));
    assert_non_null(strstr(list[1], "edu_fineweb_train_000002.bin"));
    for (int i = 0; i < n; i++) free(list[i]);
    free(list);
    list = shard_list(dir, "nothing", &n);
    assert_int_equal(n, 0);
    free(list);
    temp_remove(dir);
}

// position at which each position's document begins: sep is the token that the format or the vocabulary implies
static void check_first(const char *path, int V, int sep, const int *tok) {
    static const int expect[8] = {0, 0, 2, 2, 4, 5, 5, 5};
    int got[8], target[8], first[8];
    Loader *l = loader_open(path, "train", V, 8, 0);
    loader_window(l, 0, got, target, first);
    for (int t = 0; t < 8; t++) {
        int want = tok[t] < 0 ? sep : tok[t];
        assert_int_equal(got[t], want);
        assert_int_equal(first[t], expect[t]);
    }
    loader_close(l);
}

static void test_document_starts(void **state) {
    (void)state;
    static const int tok[9] = {7, 8, -1, 9, -1, -1, 5, 6, 4};
    static const struct { int magic, V, sep; } made[] = {
        {U16, 257, 256}, {U16, 50257, 50256}, {U16, 50304, 50256}, {U32, 128256, 128000}};
    char *dir = temp_dir(), *path = path_join(dir, "x.bin");
    for (int k = 0; k < 4; k++) {
        uint32_t head[256] = {(uint32_t)made[k].magic, 1, 9}, wide[9];
        uint16_t narrow[9];
        for (int i = 0; i < 9; i++) {
            wide[i] = (uint32_t)(tok[i] < 0 ? made[k].sep : tok[i]);
            narrow[i] = (uint16_t)wide[i];
        }
        if (made[k].magic == U16) write_bytes(path, head, sizeof head, narrow, sizeof narrow);
        else write_bytes(path, head, sizeof head, wide, sizeof wide);
        check_first(path, made[k].V, made[k].sep, tok);
    }
    // the writer's shards say which token it is: a byte-level shard keeps its documents in a model with a larger vocabulary
    ShardWriter *w = shard_writer_open(dir, "train", 0, 257, 256);
    int out[9];
    for (int i = 0; i < 9; i++) out[i] = tok[i] < 0 ? 256 : tok[i];
    shard_put(w, out, 9);
    assert_int_equal(shard_writer_tokens(w), 9);
    assert_int_equal(shard_writer_close(w), 1);
    check_first(dir, 50304, 256, tok);
    check_first(dir, 257, 256, tok);
    free(path);
    temp_remove(dir);
}

// A shard of n tokens that is a hole but for its header and its last tokens; 0 where the disk refuses.
static int write_sparse(const char *path, uint32_t n, const uint16_t *last, int n_last) {
    uint32_t head[256] = {U16, 1, n};
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    int good = fwrite(head, sizeof head, 1, f) == 1 && fflush(f) == 0 && ftruncate(fileno(f), 1024 + 2 * (off_t)n) == 0 &&
               fseeko(f, 1024 + 2 * ((off_t)n - n_last), SEEK_SET) == 0 && fwrite(last, 2, (size_t)n_last, f) == (size_t)n_last;
    return fclose(f) == 0 && good;
}

static void test_beyond_31_bits(void **state) {
    (void)state;
    static const uint32_t sizes[] = {1200000001u, 2200000000u}; // more than 2^31 bytes; more than 2^31 tokens
    char *dir = temp_dir(), *path = path_join(dir, "train.bin");
    for (int k = 0; k < 2; k++) {
        uint16_t last[4] = {11, 22, 33, 44};
        if (!write_sparse(path, sizes[k], last, 4)) {
            free(path);
            temp_remove(dir);
            skip();
        }
        int tok[3], target[3];
        int64_t n_windows = ((int64_t)sizes[k] - 1) / 3;
        Loader *l = loader_open(dir, "train", 257, 3, 0);
        assert_int_equal(loader_tokens(l), sizes[k]);
        assert_int_equal(loader_windows(l), n_windows);
        loader_window(l, n_windows - 1, tok, target, NULL);
        int64_t at = 3 * (n_windows - 1), first = (int64_t)sizes[k] - 4;
        for (int t = 0; t < 3; t++) {
            assert_int_equal(tok[t], at + t >= first ? last[at + t - first] : 0);
            assert_int_equal(target[t], at + t + 1 >= first ? last[at + t + 1 - first] : 0);
        }
        assert_int_equal(target[2], 44);
        loader_close(l);
    }
    free(path);
    temp_remove(dir);
}

// ---- damage -------------------------------------------------------------------------------------------------------

typedef struct Opening {
    const char *spec;
    int V, T;
    int read; // and read all windows
} Opening;

static void open_all(void *arg) {
    const Opening *o = arg;
    int tok[64], target[64];
    Loader *l = loader_open(o->spec, "train", o->V, o->T, 0);
    for (int64_t w = 0; o->read && w < loader_windows(l); w++) loader_window(l, w, tok, target, NULL);
    loader_close(l);
}

static void refused(Opening o, int n_parts, const char *const *parts) {
    Child c = child_call(open_all, &o);
    for (int i = 0; i < n_parts; i++)
        if (!strstr(c.out, parts[i])) fail_msg("'%s' is not in: %s", parts[i], c.out);
    if (c.status != 3) fail_msg("exit status %d: %s", c.status, c.out);
}
#define REFUSED(open, ...) refused(open, sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *), (const char *[]){__VA_ARGS__})

static void test_damage(void **state) {
    (void)state;
    char *dir = temp_dir(), *path = path_join(dir, "x.bin");
    uint16_t tok[40] = {0};
    Opening o = {path, 257, 8, 1};
    uint32_t head[256] = {U16, 1, 40};

    write_bytes(path, head, 1024, tok, 80);
    assert_int_equal(child_call(open_all, &o).status, 0);
    write_bytes(path, head, 1024, tok, 79);
    REFUSED(o, "x.bin is truncated", "token count (word 2) is 40", "1104 bytes", "has 1103");
    write_bytes(path, head, 1024, tok, 0);
    REFUSED(o, "x.bin is truncated", "1104 bytes", "has 1024");
    write_bytes(path, head, 1000, tok, 0);
    REFUSED(o, "x.bin is truncated", "1000 bytes", "header alone has 1024");
    write_bytes(path, head, 3, tok, 0);
    REFUSED(o, "x.bin (3 bytes)", "magic (word 0)");
    write_bytes(path, "", 0, tok, 0);
    REFUSED(o, "x.bin is truncated", "0 bytes");
    write_bytes(path, head, 1024, tok, 80 - 0);
    FILE *f = fopen(path, "ab");
    fputs("extra", f);
    fclose(f);
    REFUSED(o, "x.bin has 5 bytes behind its last token", "word 2) is 40", "1104 bytes", "has 1109");
    head[2] = 39; // the count is wrong, the file whole
    write_bytes(path, head, 1024, tok, 80);
    REFUSED(o, "x.bin has 2 bytes behind its last token", "word 2) is 39");
    head[2] = 0xFFFFFFF0u;
    write_bytes(path, head, 1024, tok, 80);
    REFUSED(o, "x.bin is truncated", "word 2) is 4294967280", "8589935584 bytes");
    head[2] = 40, head[1] = 2;
    write_bytes(path, head, 1024, tok, 80);
    REFUSED(o, "x.bin (1104 bytes) has version 2 (word 1)", "expected 1", "newer than this program");
    head[0] = U32, head[1] = 8, head[2] = 20;
    write_bytes(path, head, 1024, tok, 80);
    REFUSED(o, "has version 8", "expected 7 or 1", "newer");
    head[1] = 6;
    write_bytes(path, head, 1024, tok, 80);
    REFUSED(o, "has version 6", "expected 7 or 1");
    head[0] = 20240522, head[1] = 1;
    write_bytes(path, head, 1024, tok, 80);
    REFUSED(o, "x.bin (1104 bytes) is no token shard", "magic (word 0) is 20240522, expected 20240520", "multiple-choice");
    head[0] = __builtin_bswap32(U16);
    write_bytes(path, head, 1024, tok, 80);
    REFUSED(o, "is no token shard", "byte order");
    head[0] = 12345;
    write_bytes(path, head, 1024, tok, 80);
    REFUSED(o, "magic (word 0) is 12345, expected 20240520 (uint16 tokens) or 20240801 (uint32 tokens)");
    static const char *const others[][2] = {{"\n<!DOCTYPE html><html><body>404</body></html>", "web page"},
                                            {"version https://git-lfs.github.com/spec/v1\noid", "LFS pointer"},
                                            {"It is a truth universally acknowledged", "plain text"},
                                            {"{\"text\": \"a\"}\n", "--format jsonl"},
                                            {"PAR1....", "parquet"}};
    for (int i = 0; i < 5; i++) {
        write_bytes(path, others[i][0], strlen(others[i][0]), "", 0);
        REFUSED(o, "x.bin", "is no token shard", others[i][1]);
    }
    free(path);
    temp_remove(dir);
}

static void test_vocabulary_and_places(void **state) {
    (void)state;
    char *dir = temp_dir(), *path = path_join(dir, "x.bin");
    uint16_t tok[40] = {0};
    tok[30] = 257;
    write_u16(path, tok, 40);
    REFUSED(((Opening){path, 257, 8, 1}), "x.bin", "holds token 257 at 30", "vocabulary is 257", "another tokenizer");
    assert_int_equal(child_call(open_all, &(Opening){path, 257, 8, 0}).status, 0); // read first, then refused
    assert_int_equal(child_call(open_all, &(Opening){path, 258, 8, 1}).status, 0);
    REFUSED(((Opening){path, 257, 40, 0}), "40 tokens", "no window of 40 tokens", "--seq");
    assert_int_equal(child_call(open_all, &(Opening){path, 258, 39, 1}).status, 0);
    REFUSED(((Opening){dir, 257, 8, 0}), "holds none", "train*.bin", "build/prepare --out ");
    REFUSED(((Opening){"data/no-such-set", 257, 8, 0}), "data/no-such-set does not exist", "scripts/get_data.sh no-such-set");
    REFUSED(((Opening){"no/such.bin", 257, 8, 0}), "no/such.bin does not exist", "build/prepare");
    uint32_t head[256] = {U16, 1, 40, [16] = 0x2E656F6D, [17] = 50257, [18] = 50256};
    write_bytes(path, head, 1024, tok, 80);
    REFUSED(((Opening){path, 257, 8, 0}), "x.bin was made with a vocabulary of 50257, the model's is 257");
    head[18] = 50257;
    write_bytes(path, head, 1024, tok, 80);
    REFUSED(((Opening){path, 50304, 8, 0}), "separator token 50257 (word 18)", "vocabulary is 50257");
    head[17] = 70000;
    write_bytes(path, head, 1024, tok, 80);
    REFUSED(((Opening){path, 50304, 8, 0}), "vocabulary 70000 (word 17)", "1 to 65536");
    free(path);
    temp_remove(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_windows_in_file_order),
        cmocka_unit_test(test_each_window_once),
        cmocka_unit_test(test_seed_and_resume),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_document_starts),
        cmocka_unit_test(test_beyond_31_bits),
        cmocka_unit_test(test_damage),
        cmocka_unit_test(test_vocabulary_and_places),
    };
    return cmocka_run_group_tests_name("data", tests, NULL, NULL);
}
