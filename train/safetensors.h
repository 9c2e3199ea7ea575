// safetensors files: 8-byte little-endian header length, JSON header {name: {dtype, shape, data_offsets}}, raw data.
// Strict in both directions; sizes are 64-bit. A damaged file dies with STATUS_DATA: its name, the field, found and expected.
#ifndef MOE_SAFETENSORS_H
#define MOE_SAFETENSORS_H
#include "kernels/device.h"
#include <stddef.h>
#include <stdint.h>

enum { ST_MAX_DIMS = 8 };
typedef enum { ST_F64, ST_F32, ST_F16, ST_BF16, ST_DTYPES } StDtype;
size_t st_bytes(StDtype t);
const char *st_name(StDtype t);
static inline StDtype st_of_size(size_t bytes) { return bytes == 8 ? ST_F64 : ST_F32; } // of real and wide

typedef struct StTensor {
    char *name;
    StDtype dtype;
    int n_dims;
    int64_t shape[ST_MAX_DIMS];
    uint64_t begin, end;     // bytes, from the end of the header
} StTensor;
int64_t st_elements(const StTensor *t);
char *st_shape_text(const StTensor *t); // "[4, 16]"; free() it

// ---- reading ---------------------------------------------------------------------------------------------------------
typedef struct StFile {
    char *path;
    const unsigned char *map;  // the whole file
    uint64_t map_bytes, data;  // where the data begins
    StTensor *tensor;          // sorted by name
    int n;
} StFile;
// Refuses: a header that is no JSON object of tensors, doubled names, unknown dtypes, offsets that do not fit dtype and shape,
// gaps, overlaps, and a size that is not exactly what the header says.
StFile *st_open(const char *path);
void st_close(StFile *f);
const StTensor *st_find(const StFile *f, const char *name); // NULL when there is none
// out[i] = element first + i, i < n, converted to out_type (ST_F32 or ST_F64)
void st_read(void *out, StDtype out_type, const StFile *f, const StTensor *t, int64_t first, int64_t n);

// ---- writing: the header first, so all tensors must be known; then their data in the same order ---------------------------
typedef struct StWriter StWriter;
// Fills begin and end of the tensors. The writer keeps the pointer to them until st_finish.
StWriter *st_create(const char *path, StTensor *tensors, int n);
void st_append(StWriter *w, const void *data, size_t bytes); // of the next tensor, in pieces of any size
// Dies unless every byte that the header announces was appended; the file is on the disk when it returns.
void st_finish(StWriter *w);
#endif
