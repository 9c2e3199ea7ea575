#include "train/safetensors.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const struct { const char *name; size_t bytes; } dtypes[ST_DTYPES] = {{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}};
enum { HEADER_MAX = 100 << 20 }; // the format's own limit

size_t st_bytes(StDtype t) { return dtypes[t].bytes; }
const char *st_name(StDtype t) { return dtypes[t].name; }

int64_t st_elements(const StTensor *t) {
    int64_t n = 1;
    for (int i = 0; i < t->n_dims; i++) n *= t->shape[i];
    return n;
}

char *st_shape_text(const StTensor *t) {
    char *s = str_format("[");
    for (int i = 0; i < t->n_dims; i++) {
        char *longer = str_format(i ? "%s, %lld" : "%s%lld", s, (long long)t->shape[i]);
        free(s);
        s = longer;
    }
    char *whole = str_format("%s]", s);
    free(s);
    return whole;
}

// ---- reading ---------------------------------------------------------------------------------------------------------
static int by_name(const void *a, const void *b) { return strcmp(((const StTensor *)a)->name, ((const StTensor *)b)->name); }
static int by_offset(const void *a, const void *b) {
    const StTensor *x = *(StTensor *const *)a, *y = *(StTensor *const *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end; // an empty tensor comes before the one that begins where it stands
}

static uint64_t read_offset(json_t *v, const char *path, const char *name) {
    CHECK_DATA(json_is_integer(v) && json_integer_value(v) >= 0, "%s: tensor %s: data_offsets must be two whole numbers >= 0", path, name);
    return (uint64_t)json_integer_value(v);
}

static StTensor read_tensor(const char *path, const char *name, json_t *j) {
    StTensor t = {.dtype = ST_DTYPES};
    const char *dtype = json_string_value(json_object_get(j, "dtype"));
    CHECK_DATA(dtype, "%s: tensor %s: \"dtype\" is missing", path, name);
    for (int i = 0; i < ST_DTYPES; i++)
        if (strcmp(dtype, dtypes[i].name) == 0) t.dtype = i;
    CHECK_DATA(t.dtype != ST_DTYPES, "%s: tensor %s has dtype %s, expected F64, F32, F16 or BF16", path, name, dtype);
    json_t *shape = json_object_get(j, "shape"), *offsets = json_object_get(j, "data_offsets");
    CHECK_DATA(json_is_array(shape) && json_array_size(shape) <= ST_MAX_DIMS, "%s: tensor %s: \"shape\" must be a list of at most %d numbers",
               path, name, ST_MAX_DIMS);
    t.n_dims = (int)json_array_size(shape);
    int64_t bytes = (int64_t)dtypes[t.dtype].bytes;
    for (int i = 0; i < t.n_dims; i++) {
        json_t *dim = json_array_get(shape, (size_t)i);
        CHECK_DATA(json_is_integer(dim) && json_integer_value(dim) >= 0, "%s: tensor %s: dimension %d of its shape is no whole number >= 0",
                   path, name, i);
        t.shape[i] = json_integer_value(dim);
        CHECK_DATA(!__builtin_mul_overflow(bytes, t.shape[i], &bytes), "%s: tensor %s: its shape passes 64 bits", path, name);
    }
    CHECK_DATA(json_is_array(offsets) && json_array_size(offsets) == 2, "%s: tensor %s: \"data_offsets\" must be two numbers", path, name);
    t.begin = read_offset(json_array_get(offsets, 0), path, name);
    t.end = read_offset(json_array_get(offsets, 1), path, name);
    CHECK_DATA(t.end >= t.begin && t.end - t.begin == (uint64_t)bytes,
               "%s: tensor %s: data_offsets [%llu, %llu] do not fit its dtype and shape, expected %lld bytes", path, name,
               (unsigned long long)t.begin, (unsigned long long)t.end, (long long)bytes);
    t.name = str_format("%s", name);
    return t;
}

// Every byte of the data belongs to exactly one tensor.
static void check_cover(const StFile *f) {
    StTensor **order = host_alloc(SIZE(f->n, sizeof *order));
    for (int i = 0; i < f->n; i++) order[i] = &f->tensor[i];
    qsort(order, (size_t)f->n, sizeof *order, by_offset);
    uint64_t at = 0;
    for (int i = 0; i < f->n; i++) {
        CHECK_DATA(order[i]->begin == at, "%s: tensor %s begins at %llu, expected %llu: the file has a gap or an overlap", f->path,
                   order[i]->name, (unsigned long long)order[i]->begin, (unsigned long long)at);
        at = order[i]->end;
    }
    CHECK_DATA(f->map_bytes - f->data == at, "%s holds %llu bytes, expected %llu from its header (hint: an incomplete copy?)", f->path,
               (unsigned long long)f->map_bytes, (unsigned long long)(f->data + at));
    free(order);
}

static void map_file(StFile *f) {
    int64_t size = file_size(f->path);
    CHECK_DATA(size >= 0, "%s does not exist, expected a safetensors file", f->path);
    CHECK_DATA(size >= 8, "%s holds %lld bytes, too few for a safetensors header", f->path, (long long)size);
    int fd = open(f->path, O_RDONLY | O_CLOEXEC);
    CHECK_DATA(fd >= 0, "cannot open %s: %s", f->path, strerror(errno));
    void *map = mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, fd, 0);
    CHECK_DATA(map != MAP_FAILED, "cannot map %s: %s", f->path, strerror(errno));
    close(fd);
    f->map = map;
    f->map_bytes = (uint64_t)size;
}

StFile *st_open(const char *path) {
    StFile *f = host_alloc(sizeof *f);
    f->path = str_format("%s", path);
    map_file(f);
    uint64_t header = 0;
    for (int i = 7; i >= 0; i--) header = header << 8 | f->map[i];
    CHECK_DATA(header <= HEADER_MAX && header <= f->map_bytes - 8,
               "%s: its header length is %llu, the file holds %llu bytes (hint: no safetensors file, or an incomplete copy)", path,
               (unsigned long long)header, (unsigned long long)f->map_bytes);
    f->data = 8 + header;
    json_error_t e;
    json_t *j = json_loadb((const char *)f->map + 8, (size_t)header, JSON_REJECT_DUPLICATES, &e);
    CHECK_DATA(json_is_object(j), "%s: its header is no JSON object: %s", path, j ? "another kind of value" : e.text);
    f->tensor = host_alloc(SIZE(json_object_size(j), sizeof *f->tensor));
    const char *name;
    json_t *v;
    json_object_foreach(j, name, v) {
        if (strcmp(name, "__metadata__") != 0) f->tensor[f->n++] = read_tensor(path, name, v);
    }
    json_decref(j);
    check_cover(f);
    qsort(f->tensor, (size_t)f->n, sizeof *f->tensor, by_name);
    return f;
}

void st_close(StFile *f) {
    for (int i = 0; i < f->n; i++) free(f->tensor[i].name);
    munmap((void *)f->map, (size_t)f->map_bytes);
    free(f->tensor);
    free(f->path);
    free(f);
}

const StTensor *st_find(const StFile *f, const char *name) {
    StTensor key = {.name = (char *)name};
    return f->n ? bsearch(&key, f->tensor, (size_t)f->n, sizeof *f->tensor, by_name) : NULL;
}

static float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023, bits;
    if (exponent == 31) bits = sign | 0x7F800000 | fraction << 13;
    else if (exponent) bits = sign | (exponent + 112) << 23 | fraction << 13;
    else { // zero or below the smallest normal: fraction * 2^-24, which a float holds exactly
        float v = (float)fraction * 0x1p-24f;
        return sign ? -v : v;
    }
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

static double element(StDtype t, const unsigned char *at) {
    double d;
    float f;
    uint16_t h;
    uint32_t bits;
    switch (t) {
    case ST_F64: memcpy(&d, at, 8); return d;
    case ST_F32: memcpy(&f, at, 4); return f;
    case ST_F16: memcpy(&h, at, 2); return half_to_float(h);
    default: break;
    }
    memcpy(&h, at, 2);
    bits = (uint32_t)h << 16;
    memcpy(&f, &bits, 4);
    return f;
}

void st_read(void *out, StDtype out_type, const StFile *f, const StTensor *t, int64_t first, int64_t n) {
    CHECK_DATA(first >= 0 && n >= 0 && first <= st_elements(t) - n, "%s: tensor %s has %lld elements, wanted %lld from %lld", f->path, t->name,
               (long long)st_elements(t), (long long)n, (long long)first);
    size_t bytes = dtypes[t->dtype].bytes;
    const unsigned char *at = f->map + f->data + t->begin + (size_t)first * bytes;
    if (out_type == t->dtype) {
        if (n) memcpy(out, at, (size_t)n * bytes);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        double v = element(t->dtype, at + (size_t)i * bytes);
        if (out_type == ST_F64) ((double *)out)[i] = v;
        else ((float *)out)[i] = (float)v;
    }
}

// ---- writing ---------------------------------------------------------------------------------------------------------
struct StWriter {
    char *path;
    FILE *file;
    const StTensor *tensor;
    int n;
    uint64_t total, written;
};

static char *header_text(StTensor *tensors, int n, uint64_t *total) {
    json_t *j = json_object();
    json_object_set_new(j, "__metadata__", json_pack("{s:s}", "format", "pt"));
    uint64_t at = 0;
    for (int i = 0; i < n; i++) {
        StTensor *t = &tensors[i];
        json_t *shape = json_array();
        for (int k = 0; k < t->n_dims; k++) json_array_append_new(shape, json_integer(t->shape[k]));
        t->begin = at;
        at = t->end = at + (uint64_t)st_elements(t) * dtypes[t->dtype].bytes;
        CHECK_DATA(!json_object_get(j, t->name), "tensor %s would be written twice", t->name);
        json_object_set_new(j, t->name, json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtypes[t->dtype].name, "shape", shape, "data_offsets",
                                                  (json_int_t)t->begin, (json_int_t)t->end));
    }
    *total = at;
    char *text = json_dumps(j, JSON_COMPACT);
    json_decref(j);
    return text;
}

StWriter *st_create(const char *path, StTensor *tensors, int n) {
    StWriter *w = host_alloc(sizeof *w);
    w->path = str_format("%s", path);
    w->tensor = tensors;
    w->n = n;
    char *text = header_text(tensors, n, &w->total);
    uint64_t length = strlen(text), padded = (length + 7) / 8 * 8;
    unsigned char head[8];
    for (int i = 0; i < 8; i++) head[i] = (unsigned char)(padded >> 8 * i);
    w->file = fopen(path, "wb");
    CHECK_DATA(w->file, "cannot create %s: %s", path, strerror(errno));
    int good = fwrite(head, 8, 1, w->file) == 1 && fwrite(text, 1, length, w->file) == length;
    for (uint64_t i = length; i < padded; i++) good &= fputc(' ', w->file) != EOF;
    CHECK_DATA(good, "cannot write %s: %s (hint: is the disk full?)", path, strerror(errno));
    free(text);
    return w;
}

void st_append(StWriter *w, const void *data, size_t bytes) {
    CHECK_DATA(bytes <= w->total - w->written, "%s: %llu bytes of tensors were announced, more came", w->path, (unsigned long long)w->total);
    CHECK_DATA(fwrite(data, 1, bytes, w->file) == bytes, "cannot write %s: %s (hint: is the disk full?)", w->path, strerror(errno));
    w->written += bytes;
}

void st_finish(StWriter *w) {
    CHECK_DATA(w->written == w->total, "%s: %llu bytes of tensors were announced, %llu came", w->path, (unsigned long long)w->total,
               (unsigned long long)w->written);
    int good = fflush(w->file) == 0 && fsync(fileno(w->file)) == 0;
    good &= fclose(w->file) == 0;
    CHECK_DATA(good, "cannot write %s: %s (hint: is the disk full?)", w->path, strerror(errno));
    free(w->path);
    free(w);
}
