#include "tests/ref/gemm_ref.h"
#include <math.h>
#include <stddef.h>

void ref_product(double *c, double *size, const double *z, const double *a, int a_turned, const double *b, int b_turned, int m,
                 int n, int k) {
    for (size_t i = 0; i < (size_t)m; i++)
        for (size_t j = 0; j < (size_t)n; j++) {
            long double sum = z ? z[i * n + j] : 0, all = fabsl(sum);
            for (size_t q = 0; q < (size_t)k; q++) {
                long double x = a_turned ? a[q * m + i] : a[i * k + q];
                long double y = b_turned ? b[j * k + q] : b[q * n + j];
                sum += x * y;
                all += fabsl(x * y);
            }
            c[i * n + j] = (double)sum;
            size[i * n + j] = (double)all;
        }
}
