// cuBLAS: plain products in fp32, k ascending for every element.
#include "cublas_v2.h"
#include "cuda_bf16.h"
#include <vector>

using namespace emu;

struct EmuCublas {
    cudaStream_t stream;
};

namespace {

struct Matrix { // column-major
    const void *at;
    cudaDataType_t type;
    int ld;
};

size_t size_of(cudaDataType_t t) { return t == CUDA_R_32F ? 4 : 2; }

float load(const void *at, cudaDataType_t t, size_t i) {
    return t == CUDA_R_32F ? ((const float *)at)[i] : (float)((const __nv_bfloat16 *)at)[i];
}

// c[0..m) += a[0..m) b
#if defined(__x86_64__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
__attribute__((target_clones("arch=x86-64-v3", "default"), optimize("O3")))
#endif
void axpy(float *__restrict__ c, const float *__restrict__ a, float b, int m) {
    for (int i = 0; i < m; i++) c[i] += a[i] * b;
}

enum { M_BLOCK = 512 }; // elements of a column of C at a time: with the same rows of A they stay in the cache

void gemm(cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, float alpha, Matrix A, Matrix B, float beta, void *C,
          cudaDataType_t type, int ldc) {
    std::vector<float> a((size_t)M_BLOCK * (size_t)k), c(M_BLOCK);
    for (int m0 = 0; m0 < m; m0 += M_BLOCK) {
        int mb = m - m0 < M_BLOCK ? m - m0 : M_BLOCK;
        for (int l = 0; l < k; l++)
            for (int i = 0; i < mb; i++) {
                size_t row = (size_t)(m0 + i), at = ta == CUBLAS_OP_N ? row + (size_t)l * (size_t)A.ld : (size_t)l + row * (size_t)A.ld;
                a[(size_t)l * (size_t)mb + (size_t)i] = load(A.at, A.type, at);
            }
        for (int j = 0; j < n; j++) {
            for (int i = 0; i < mb; i++) c[(size_t)i] = 0;
            for (int l = 0; l < k; l++)
                axpy(c.data(), &a[(size_t)l * (size_t)mb],
                     load(B.at, B.type, tb == CUBLAS_OP_N ? (size_t)l + (size_t)j * (size_t)B.ld : (size_t)j + (size_t)l * (size_t)B.ld), mb);
            for (int i = 0; i < mb; i++) {
                size_t at = (size_t)(m0 + i) + (size_t)j * (size_t)ldc;
                float v = alpha * c[(size_t)i] + (beta != 0 ? beta * load(C, type, at) : 0);
                if (type == CUDA_R_32F) ((float *)C)[at] = v;
                else ((__nv_bfloat16 *)C)[at] = v;
            }
        }
    }
}

bool known(cudaDataType_t t) { return t == CUDA_R_32F || t == CUDA_R_16BF; }

// That the last element of a matrix lies where its first does
void check(const char *name, const void *p, cudaDataType_t t, int rows, int columns, int ld, long long stride, int batch) {
    if (!rows || !columns || !batch) return;
    long long last = stride * (batch - 1) + (long long)ld * (columns - 1) + rows;
    if (where(p, (size_t)last * size_of(t), name) == HOST) fail("%s is the host's memory", name);
}

} // namespace

extern "C" {
cublasStatus_t cublasCreate(cublasHandle_t *h) { return *h = new EmuCublas{nullptr}, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasDestroy(cublasHandle_t h) { return delete h, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetStream(cublasHandle_t h, cudaStream_t s) { return h->stream = s, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetWorkspace(cublasHandle_t, void *, size_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetAtomicsMode(cublasHandle_t, cublasAtomicsMode_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasGetVersion(cublasHandle_t, int *version) { return *version = 130000, CUBLAS_STATUS_SUCCESS; }
const char *cublasGetStatusString(cublasStatus_t s) { return s == CUBLAS_STATUS_SUCCESS ? "success" : "an argument that is not supported"; }

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                                          const void *alpha, const void *A, cudaDataType_t Atype, int lda, long long strideA,
                                              const void *B,
                                          cudaDataType_t Btype, int ldb, long long strideB, const void *beta, void *C,
                                              cudaDataType_t Ctype,
                                          int ldc, long long strideC, int batch, cublasComputeType_t, cublasGemmAlgo_t) {
    if (!h) return CUBLAS_STATUS_NOT_INITIALIZED;
    int a_rows = ta == CUBLAS_OP_N ? m : k, b_rows = tb == CUBLAS_OP_N ? k : n;
    if (m < 0 || n < 0 || k < 0 || batch < 0 || lda < a_rows || lda < 1 || ldb < b_rows || ldb < 1 || ldc < m || ldc < 1)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!known(Atype) || Btype != Atype || !known(Ctype) || (Atype == CUDA_R_32F && Ctype != CUDA_R_32F)) return CUBLAS_STATUS_NOT_SUPPORTED;
    check("cuBLAS: A", A, Atype, a_rows, ta == CUBLAS_OP_N ? k : m, lda, strideA, batch);
    check("cuBLAS: B", B, Btype, b_rows, tb == CUBLAS_OP_N ? n : k, ldb, strideB, batch);
    check("cuBLAS: C", C, Ctype, m, n, ldc, strideC, batch);
    if (!m || !n || !batch) return CUBLAS_STATUS_SUCCESS;
    float al = *(const float *)alpha, be = *(const float *)beta;
    enqueue("cuBLAS", h->stream, [=] {
        for (long long i = 0; i < batch; i++)
            gemm(ta, tb, m, n, k, al, {(const char *)A + (size_t)(i * strideA) * size_of(Atype), Atype, lda},
                 {(const char *)B + (size_t)(i * strideB) * size_of(Btype), Btype, ldb}, be,
                 (char *)C + (size_t)(i * strideC) * size_of(Ctype), Ctype, ldc);
        return DONE;
    });
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *alpha,
                            const void *A, cudaDataType_t Atype, int lda, const void *B, cudaDataType_t Btype, int ldb,
                                const void *beta,
                            void *C, cudaDataType_t Ctype, int ldc, cublasComputeType_t compute, cublasGemmAlgo_t algo) {
    return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, A, Atype, lda, 0, B, Btype, ldb, 0, beta, C, Ctype, ldc, 0, 1,
                                      compute, algo);
}
}
