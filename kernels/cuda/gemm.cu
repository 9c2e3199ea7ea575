// Dense products, by cuBLAS with fp32 accumulators. The same shape gives the same bits on the same GPU, but a row's bits may
// change with the number of rows: the one place where this backend departs from the rules of device.h.
#include "kernels/cuda/dev.h"

static constexpr cudaDataType_t REAL_TYPE = sizeof(real) == 2 ? CUDA_R_16BF : CUDA_R_32F;

// c = beta c + op(a) op(b) as cuBLAS sees it, columns first: what is (rows,columns) here is (columns,rows) there
static void blas_product(Dev *d, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const real *a, int lda,
                         const real *b, int ldb, void *c, cudaDataType_t type, float beta) {
    const float one = 1;
    const cublasStatus_t s = cublasGemmEx(d->blas, ta, tb, m, n, k, &one, a, REAL_TYPE, lda, b, REAL_TYPE, ldb, &beta, c, type, m,
                                          CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    CHECK_DEVICE(s == CUBLAS_STATUS_SUCCESS, "cuBLAS cannot multiply %d x %d x %d: status %d", m, n, k, (int)s);
}

// y (n elements) before a product with a sum over k that adds to it; whether there is one to do
static bool prepare(Dev *d, real *y, const real *add, size_t n, int k) {
    if (!n) return false;
    if (add && add != y) dev_copy(d, y, add, n * sizeof(real));
    if (!k && !add) dev_zero(d, y, n * sizeof(real));
    return k > 0;
}

extern "C" void dev_linear(Dev *d, real *y, const real *add, const real *x, const real *w, int M, int N, int K) {
    if (prepare(d, y, add, SIZE(M, N), K))
        blas_product(d, CUBLAS_OP_T, CUBLAS_OP_N, N, M, K, w, K, x, K, y, REAL_TYPE, add ? 1 : 0);
}

extern "C" void dev_linear_dx(Dev *d, real *dx, const real *add, const real *dy, const real *w, int M, int N, int K) {
    if (prepare(d, dx, add, SIZE(M, K), N))
        blas_product(d, CUBLAS_OP_N, CUBLAS_OP_N, K, M, N, w, K, dy, N, dx, REAL_TYPE, add ? 1 : 0);
}

extern "C" void dev_linear_dw(Dev *d, wide *dw, const real *dy, const real *x, int M, int N, int K) {
    if (M && N && K) blas_product(d, CUBLAS_OP_N, CUBLAS_OP_T, K, N, M, x, K, dy, N, dw, CUDA_R_32F, 1);
}
