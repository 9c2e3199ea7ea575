// Naive oracles of attention and of QK-norm with RoPE, in double: whole rows of probabilities, one query at a time.
// Beside each result stands its size in roundings: |result - exact| <= REAL_EPS * size, for sums in any blocked order, where
// results, probabilities and their gradients are kept in numbers that cost `store` roundings each.
#ifndef MOE_TESTS_ATTENTION_REF_H
#define MOE_TESTS_ATTENTION_REF_H
typedef struct RefAttn {
    int B, Tq, Tk, NH, NKV, HS;
    double store;
    const double *q;           // (B,Tq,NH,HS)
    const double *k, *v;       // (B,Tk,NKV,HS)
    const int *first;          // (B,Tq) or NULL
    const double *dout;        // (B,Tq,NH,HS), backward only
    double *o, *o_size;        // like q, overwritten by both
    double *lse, *lse_size;    // (B,NH,Tq), overwritten by both
    double *dq, *dk, *dv, *dq_size, *dk_size, *dv_size; // overwritten by the backward pass (Tq = Tk)
} RefAttn;
void ref_attention(const RefAttn *a);
void ref_attention_bwd(const RefAttn *a);

typedef struct RefRope {
    int B, T, pos0, NH, NKV, HS;
    double theta, eps, store;
    const double *qkv;         // (B,T,(NH+2NKV),HS)
    const double *wq, *wk;     // (HS), both NULL = no norm
    double *qk;                // (B,T,NH+NKV,HS) overwritten
    double *rstd;              // (B,T,NH+NKV) overwritten
} RefRope;
void ref_rope(const RefRope *r);
// dx (B,T,NH+NKV,HS: no values), dwq, dwk (HS) overwritten, sizes beside them | dqk like qk; qk, rstd are overwritten as well
void ref_rope_bwd(const RefRope *r, const double *dqk, double *dx, double *dx_size, double *dwq, double *dwk, double *dw_size);
#endif
