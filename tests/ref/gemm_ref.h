// Naive oracle of a product, in long double: no blocks, no packing.
#ifndef MOE_TESTS_GEMM_REF_H
#define MOE_TESTS_GEMM_REF_H
// c[i,j] = z[i,j] + sum_k a(i,k) b(k,j); size[i,j] = |z[i,j]| + sum_k |a(i,k) b(k,j)|, what rounding errors are relative to
// c, size (m,n) overwritten | z (m,n) or NULL, may be c | a (m,k), or (k,m) if a_turned | b (k,n), or (n,k) if b_turned
void ref_product(double *c, double *size, const double *z, const double *a, int a_turned, const double *b, int b_turned, int m,
                 int n, int k);
#endif
