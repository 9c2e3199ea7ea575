// The byte-level tokenizer and the files that it writes for other tools.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
// cmocka wants the above first
#include <cmocka.h>
#include <jansson.h>

#include "data/tokenizer.h"
#include "kernels/files.h"
#include "tests/common/child.h"

static void decode_257(void *arg) {
    size_t n;
    tokenizer_piece(arg, 257, &n);
}

static void open_unknown(void *arg) { tokenizer_close(tokenizer_open(arg)); }

static void test_round_trip(void **state) {
    (void)state;
    enum { N = 1024 };
    Tokenizer *t = tokenizer_open("bytes");
    assert_int_equal(tokenizer_vocab(t), 257);
    assert_int_equal(tokenizer_separator(t), 256);
    assert_string_equal(tokenizer_kind(t), "bytes");
    char text[N];
    for (int i = 0; i < N; i++) text[i] = (char)((unsigned)i * (unsigned)(1 + i / 256)); // every byte, in several orders, zeros too
    int ids[N];
    size_t n;
    assert_int_equal(tokenizer_encode(t, ids, text, N), N);
    for (int i = 0; i < 256; i++) assert_int_equal(ids[i], i);
    char *back = tokenizer_decode(t, ids, N, &n);
    assert_int_equal(n, N);
    assert_memory_equal(back, text, N);
    assert_int_equal(back[N], 0);
    free(back);
    back = tokenizer_decode(t, (int[]){'a', 256, 'b'}, 3, &n);
    assert_string_equal(back, "a<|endoftext|>b");
    free(back);
    assert_int_equal(tokenizer_encode(t, ids, "<|endoftext|>", 13), 13); // as text it stays text
    back = tokenizer_decode(t, ids, 0, &n);
    assert_int_equal(n, 0);
    free(back);
    Child c = child_call(decode_257, t);
    assert_int_equal(c.status, 3);
    assert_non_null(strstr(c.out, "token 257"));
    c = child_call(open_unknown, "gpt2");
    assert_int_equal(c.status, 2);
    assert_non_null(strstr(c.out, "'gpt2'"));
    tokenizer_close(t);
}

// The characters that stand for bytes, as published for GPT-2: U+0100 + n for the n-th of the bytes without a printable
// Latin-1 character of their own, the character itself for the others.
static void test_tokenizer_files(void **state) {
    (void)state;
    char *dir = temp_dir();
    Tokenizer *t = tokenizer_open("bytes");
    tokenizer_write(t, dir);
    tokenizer_close(t);
    char *path = path_join(dir, "tokenizer.json");
    json_error_t error;
    json_t *all = json_load_file(path, 0, &error);
    free(path);
    assert_non_null(all);
    json_t *vocab = json_object_get(json_object_get(all, "model"), "vocab");
    assert_int_equal(json_object_size(vocab), 256);
    static const struct { const char *key; int byte; } known[] = {
        {"!", '!'}, {"a", 'a'}, {"~", '~'}, {"\u0120", ' '}, {"\u010A", '\n'}, {"\u0100", 0}, {"\u011F", 31}, {"\u0121", 127},
        {"\u0142", 160}, {"\u00A1", 161}, {"\u00AC", 172}, {"\u0143", 173}, {"\u00AE", 174}, {"\u00FF", 255}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        assert_int_equal(json_integer_value(json_object_get(vocab, known[i].key)), known[i].byte);
    int used[256] = {0};
    const char *key;
    json_t *id;
    json_object_foreach(vocab, key, id) used[json_integer_value(id)]++;
    for (int i = 0; i < 256; i++) assert_int_equal(used[i], 1);
    json_t *special = json_array_get(json_object_get(all, "added_tokens"), 0);
    assert_int_equal(json_integer_value(json_object_get(special, "id")), 256);
    assert_string_equal(json_string_value(json_object_get(special, "content")), "<|endoftext|>");
    json_decref(all);
    path = path_join(dir, "tokenizer_config.json");
    all = json_load_file(path, 0, &error);
    assert_string_equal(json_string_value(json_object_get(all, "eos_token")), "<|endoftext|>");
    json_decref(all);
    free(path);
    temp_remove(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_round_trip), cmocka_unit_test(test_tokenizer_files)};
    return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}
