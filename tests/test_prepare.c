// The program build/prepare, run as a user runs it; what it wrote is read word by word, not by the code under test.
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
#include "kernels/files.h"
#include "tests/common/child.h"

enum { SEP = 256 };
static char *dir, *prepare; // a fresh folder for each test; the program

static int setup(void **state) {
    (void)state;
    dir = temp_dir();
    prepare = program_path("prepare");
    return 0;
}

static int teardown(void **state) {
    (void)state;
    temp_remove(dir);
    free(prepare);
    return 0;
}

// Runs it within the folder: "--out o ..." with n bytes on standard input.
static Child run_with(const char *arguments, const void *input, size_t n) {
    char *command = str_format("cd '%s' && '%s' --out o %s", dir, prepare, arguments);
    Child c = child_shell(command, input, n);
    free(command);
    return c;
}

static void succeeds(const char *arguments, const void *input, size_t n) {
    Child c = run_with(arguments, input, n);
    if (c.status != 0) fail_msg("%s: exit status %d: %s", arguments, c.status, c.out);
}

static void refused(const char *arguments, const char *input, int status, const char *part, const char *part2) {
    Child c = run_with(arguments, input, strlen(input));
    if (!strstr(c.out, part) || !strstr(c.out, part2)) fail_msg("%s: '%s', '%s' expected in: %s", arguments, part, part2, c.out);
    if (c.status != status) fail_msg("%s: exit status %d: %s", arguments, c.status, c.out);
}

static void put(const char *name, const void *bytes, size_t n) {
    char *path = path_join(dir, name);
    file_write(path, bytes, n);
    free(path);
}

static int exists(const char *name) {
    char *path = path_join(dir, name);
    int64_t size = file_size(path);
    free(path);
    return size >= 0;
}

// The shard's tokens as text, each separator as '#'; asserts the header and the size. Free it.
static char *tokens(const char *name, size_t *n) {
    char *path = path_join(dir, name);
    size_t bytes;
    char *file = file_read(path, &bytes);
    free(path);
    uint32_t head[256];
    assert_true(bytes >= sizeof head);
    memcpy(head, file, sizeof head);
    assert_int_equal(head[0], 20240520);
    assert_int_equal(head[1], 1);
    *n = head[2];
    assert_int_equal(bytes, 1024 + 2 * *n);
    char *text = malloc(*n + 1);
    for (size_t i = 0; i < *n; i++) {
        uint16_t tok;
        memcpy(&tok, file + 1024 + 2 * i, 2);
        assert_true(tok <= SEP);
        text[i] = tok == SEP ? '#' : (char)tok;
    }
    text[*n] = 0;
    free(file);
    return text;
}

static void holds(const char *name, const char *expected) {
    size_t n;
    char *text = tokens(name, &n);
    assert_int_equal(n, strlen(expected));
    assert_string_equal(text, expected);
    free(text);
}

// ---- split and documents ------------------------------------------------------------------------------------------

static void test_any_bytes(void **state) {
    (void)state;
    enum { N = 100003, CUT = 90002 }; // (1 - 0.1) N, rounded down
    char *bytes = malloc(N);
    for (int i = 0; i < N; i++) bytes[i] = (char)((i * 7919) >> 3); // all 256 values
    put("in", bytes, N);
    succeeds("--documents file in", "", 0);
    size_t n_train, n_val;
    char *train = tokens("o/train.bin", &n_train), *val = tokens("o/val.bin", &n_val);
    assert_int_equal(n_train, 1 + CUT);
    assert_int_equal(n_val, 1 + N - CUT);
    assert_int_equal(train[0], '#');
    assert_int_equal(val[0], '#');
    assert_memory_equal(train + 1, bytes, CUT);
    assert_memory_equal(val + 1, bytes + CUT, N - CUT);
    free(train);
    free(val);
    free(bytes);
}

static void test_split(void **state) {
    (void)state;
    succeeds("-", "0123456789", 10);
    holds("o/train.bin", "#012345678");
    holds("o/val.bin", "#9");
    succeeds("--overwrite --val-fraction 0.25 -", "0123456789", 10);
    holds("o/train.bin", "#0123456");
    holds("o/val.bin", "#789");
    // the cut is at a byte, wherever documents begin: a document across it is cut in two, each half begins anew
    succeeds("--overwrite --val-fraction 0.5 -", "abcd<|endoftext|>efgh<|endoftext|>ij", 36);
    holds("o/train.bin", "#abcd#e");
    holds("o/val.bin", "#fgh#ij");
    succeeds("--overwrite --val-fraction 0.5 -", "abcd<|endoftext|>efgh", 21);
    holds("o/train.bin", "#abcd");
    holds("o/val.bin", "#efgh");
    // each input by itself
    put("a", "aaaaabbbbb", 10);
    put("b", "ccdd", 4);
    succeeds("--overwrite --val-fraction=0.5 a b", "", 0);
    holds("o/train.bin", "#aaaaa#cc");
    holds("o/val.bin", "#bbbbb#dd");
}

static void test_all_or_nothing(void **state) {
    (void)state;
    succeeds("--val-fraction 0 -", "train", 5);
    assert_false(exists("o/val.bin"));
    succeeds("--val-fraction 1 -", "val", 3);
    holds("o/train.bin", "#train");
    holds("o/val.bin", "#val");
}

static void test_marks(void **state) {
    (void)state;
    static const struct { const char *in, *out; } cases[] = {
        {"one\n<|endoftext|>\ntwo\n", "#one#two\n"},            // one newline on either side belongs to the mark
        {"one\n\n<|endoftext|>\n\ntwo", "#one\n#\ntwo"},        // and only one
        {"<|endoftext|>\n<|endoftext|>one<|endoftext|>", "#one"}, // empty documents leave nothing
        {"a<|endoftext|b<|<|endoftext|>c<<|endoftext|>", "#a<|endoftext|b<|#c<"},
        {"no mark\n", "#no mark\n"},
        {"\n", "#\n"},
        {"end <|endo", "#end <|endo"},
        {"\n<|endo\n<|endoftext|>", "#\n<|endo"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        succeeds("--overwrite --val-fraction 0 -", cases[i].in, strlen(cases[i].in));
        holds("o/train.bin", cases[i].out);
    }
    succeeds("--overwrite --val-fraction 0 --documents file -", cases[0].in, strlen(cases[0].in));
    holds("o/train.bin", "#one\n<|endoftext|>\ntwo\n");
}

static void test_blank_lines(void **state) {
    (void)state;
    const char *in = "\n\none\nmore\n\n \t\r\ntwo\n\nthree";
    succeeds("--val-fraction 0 --documents blank -", in, strlen(in));
    holds("o/train.bin", "#one\nmore\n#two\n#three");
    succeeds("--overwrite --val-fraction 0 --documents blank -", "a\0\n\0\n\nb", 7);
    size_t n;
    char *text = tokens("o/train.bin", &n);
    assert_int_equal(n, 8); // zeros are text, so the second line is not blank
    assert_memory_equal(text, "#a\0\n\0\n#b", 8);
    free(text);
}

static void test_jsonl(void **state) {
    (void)state;
    const char *in = "{\"text\": \"one\", \"n\": 1}\n\n{\"text\": \"\"}\n"
                     "{\"text\": \"t\\u00e9\\n<|endoftext|>\\u0000\"}\n  {\"text\": \"z\"}";
    put("in.jsonl", in, strlen(in));
    Child c = run_with("--format jsonl --val-fraction 0 in.jsonl", "", 0);
    assert_int_equal(c.status, 0);
    assert_non_null(strstr(c.out, "3 documents"));
    assert_non_null(strstr(c.out, "1 empty document skipped"));
    size_t n;
    char *text = tokens("o/train.bin", &n);
    const char expected[] = "#one#t\xC3\xA9\n<|endoftext|>\0#z";
    assert_int_equal(n, sizeof expected - 1);
    assert_memory_equal(text, expected, n);
    free(text);
    succeeds("--overwrite --format jsonl --key story --val-fraction 0 -", "{\"story\": \"s\"}\n", 15);
    holds("o/train.bin", "#s");
    refused("--overwrite --format jsonl -", "{\"text\": \"a\"}\n{\"text\": 5}\n", 3, "line 2 has no string", "'text'");
    refused("--overwrite --format jsonl --key body -", "{\"text\": \"a\"}\n", 3, "line 1 has no string", "'body'");
    refused("--overwrite --format jsonl -", "{\"text\": \"a\"}\n\n{\"text\": \"b\"\n", 3, "standard input: line 3",
            "--format jsonl expects");
    refused("--overwrite --format jsonl -", "[\"text\"]\n", 3, "line 1 has no string", "'text'");
    refused("--overwrite --format jsonl -", "{\"text\": \"\"}\n", 3, "standard input holds no text", "");
    holds("o/train.bin", "#s"); // a refused input leaves the old shards as they were
}

static void test_many_documents(void **state) {
    (void)state;
    enum { N = 20000 };
    char *in = malloc(3 * N);
    for (int i = 0; i < N; i++) memcpy(in + 3 * i, (char[]){(char)('a' + i % 26), '\n', '\n'}, 3);
    succeeds("--val-fraction 0 --documents blank -", in, 3 * N);
    size_t n;
    char *text = tokens("o/train.bin", &n);
    assert_int_equal(n, 3 * N);
    for (int i = 0; i < N; i++) assert_memory_equal(text + 3 * i, ((char[]){'#', (char)('a' + i % 26), '\n'}), 3);
    free(text);
    free(in);
}

// ---- shards -------------------------------------------------------------------------------------------------------

static void test_shard_limit(void **state) {
    (void)state;
    succeeds("--shard-tokens 4 --val-fraction 0.1 -", "abcdefghijklmnopqrst", 20); // 18 + 2 bytes
    holds("o/train_000000.bin", "#abc");
    holds("o/train_000001.bin", "defg");
    holds("o/train_000004.bin", "pqr");
    holds("o/val_000000.bin", "#st");
    assert_false(exists("o/train.bin"));
    assert_false(exists("o/train_000005.bin"));
    // a separator fills a shard up to its limit
    succeeds("--overwrite --shard-tokens 4 --val-fraction 0 -", "ab<|endoftext|>cd", 17);
    holds("o/train_000000.bin", "#ab#");
    holds("o/train_000001.bin", "cd");
    // a full last shard is followed by none
    succeeds("--overwrite --shard-tokens 4 --val-fraction 0 -", "abc", 3);
    holds("o/train_000000.bin", "#abc");
    assert_false(exists("o/train_000001.bin"));
    assert_true(exists("o/val_000000.bin")); // not its to replace
    char *o = path_join(dir, "o");
    succeeds("--overwrite --shard-tokens 100 --val-fraction 0 -", "abcdefghijklmnopqrst", 20);
    Loader *l = loader_open(o, "train", 257, 4, 0);
    assert_int_equal(loader_windows(l), 5);
    int tok[4], target[4], first[4];
    loader_window(l, 0, tok, target, first);
    assert_int_equal(tok[0], SEP);
    assert_int_equal(target[3], 'd');
    loader_close(l);
    free(o);
}

static void test_overwrite(void **state) {
    (void)state;
    succeeds("--val-fraction 0 --shard-tokens 3 -", "abcdef", 6);
    refused("--val-fraction 0 -", "new", 2, "o holds o/train_000000.bin already", "--overwrite");
    holds("o/train_000000.bin", "#ab");
    succeeds("--val-fraction 0 --overwrite -", "new", 3);
    holds("o/train.bin", "#new");
    assert_false(exists("o/train_000000.bin")); // or the loader would read old and new together
    assert_false(exists("o/train_000001.bin"));
    char *command = str_format("ls -A '%s/o'", dir);
    Child c = child_shell(command, "", 0);
    free(command);
    assert_string_equal(c.out, "train.bin\n"); // no temporary file is left
}

static void test_bad_input(void **state) {
    (void)state;
    put("empty", "", 0);
    put("one", "x", 1);
    refused("empty", "", 3, "empty holds no text", "");
    refused("-", "<|endoftext|>\n", 3, "standard input holds no text", "");
    refused("one", "", 3, "one has 1 bytes", "--val-fraction 0");
    succeeds("--val-fraction 0 one", "", 0);
    holds("o/train.bin", "#x");
    refused("--overwrite no-such-file", "", 3, "no-such-file: cannot read", "No such file");
    refused("--overwrite .", "", 3, ".: cannot read", "directory");
    refused("", "", 2, "no input is named", "build/prepare");
    refused("--val-fraction 1.5 one", "", 2, "val-fraction", "1.5");
    refused("--format xml one", "", 2, "format", "xml");
    refused("--tokenizer gpt2 one", "", 2, "'gpt2'", "'bytes'");
    holds("o/train.bin", "#x");
}

// What a killed run left goes; what a running one has, or another program, stays.
static void test_leftovers(void **state) {
    (void)state;
    char *running = str_format("o/val_000000.bin.tmp.%ld", (long)getpid()), *folder = path_join(dir, "o");
    dir_make(folder);
    put("o/train_000003.bin.tmp.999999999", "x", 1); // past the largest process id
    put("o/other_000003.bin.tmp.999999999", "x", 1);
    put(running, "x", 1);
    put("in", "some text, enough for two parts", 31);
    succeeds("in", "", 0);
    assert_true(!exists("o/train_000003.bin.tmp.999999999") && exists("o/other_000003.bin.tmp.999999999") && exists(running));
    free(running), free(folder);
}

int main(void) {
#define CASE(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        CASE(test_any_bytes), CASE(test_split), CASE(test_all_or_nothing), CASE(test_marks), CASE(test_blank_lines),
        CASE(test_jsonl), CASE(test_many_documents), CASE(test_shard_limit), CASE(test_overwrite), CASE(test_bad_input),
        CASE(test_leftovers),
    };
    return cmocka_run_group_tests_name("prepare", tests, NULL, NULL);
}
