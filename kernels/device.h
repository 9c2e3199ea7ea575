// The hardware, as the rest of the tree sees it: memory, and the operations a layer is made of.
// One backend is linked in: kernels/cpu (C11 + OpenMP) or kernels/cuda. Symbols (B, T, C, ...) are in model/model.h.
//
// Rules for every op
// - Arrays are dense and row-major, the shape stands beside the name; an output comes before the inputs.
// - "x overwritten" or "x accumulates" is said for each output. Inputs and outputs do not overlap unless it is said.
// - Every sum runs in one fixed order, so that a result does not depend on the number of threads, and a row of a
//   product does not depend on which other rows are in the batch.
// - Pointers are device memory; nothing above kernels/ dereferences one. Sizes may be 0.
// - An op that takes `const int *n_rows` reads the number of valid rows from the device; NULL means all M rows.
//   Rows past it are neither read nor written.
#ifndef MOE_DEVICE_H
#define MOE_DEVICE_H
#include <stddef.h>
#include <stdint.h>

// real: activations and the weights that products read. wide: accumulators, gradients, router scores, losses, optimizer state.
#ifdef REAL_DOUBLE
typedef double real, wide;
#else
typedef float wide;
#ifndef REAL_BF16
typedef float real;
#elif defined __cplusplus
typedef __nv_bfloat16 real; // kernels/cuda
#else
typedef struct Bf16 { // bfloat16: the upper half of a float, in whose place nothing above kernels/ can do arithmetic
    uint16_t bits;
} real;
#endif
#endif

// On the host: one element from and to a number, rounded to the nearest, ties to even.
#ifndef __cplusplus
#ifdef REAL_BF16
static inline real real_of(double x) {
    union { float f; uint32_t u; } v = {.f = (float)x};
    int nan = (v.u & 0x7FFFFFFF) > 0x7F800000;
    return (real){(uint16_t)(nan ? 0x7FFF : (v.u + 0x7FFF + (v.u >> 16 & 1)) >> 16)};
}
static inline double real_value(real x) { return (union { uint32_t u; float f; }){.u = (uint32_t)x.bits << 16}.f; }
#else
static inline real real_of(double x) { return (real)x; }
static inline double real_value(real x) { return x; }
#endif
#endif

typedef struct Dev Dev; // one rank's device: its threads, its memory, its clock

// ---- life, memory -------------------------------------------------------------------------------------------------
typedef struct DevOptions {
    int threads; // CPU threads of this rank; 0 = as OpenMP says
    int place;   // this rank among those of its machine: which GPU is its own
    int shared;  // virtual ranks: several may have the same GPU
    int ranks;   // of its machine, which share its memory or its GPUs; 0 = 1
    int poison;  // fill new memory with NaN instead of zero, so that a read of unwritten rows shows
    int strict;  // tests: memory cannot be touched outside ops, so that a host access to it crashes
} DevOptions;
Dev *dev_init(DevOptions options);
void dev_free(Dev *d);                                      // with all its memory
const char *dev_name(const Dev *d);                         // e.g. "CPU, 2 threads, AVX2 kernels, fp32"
void *dev_alloc(Dev *d, size_t bytes, const char *what);    // zeroed (or poisoned), 64-byte aligned, or die; lives until dev_release
                                                            // or dev_free
void dev_release(Dev *d, void *p);                          // what dev_alloc returned, or NULL; waits for the ops so far and forgets
                                                            // a record, which may use it. A GPU may wait for all ranks' ops on it
int dev_lazy(const Dev *d);                                 // 1: of its memory and windows, pages never touched cost nothing (CPU)
double dev_available(const Dev *d);                          // bytes that its memory has left for this rank; INFINITY: unknown
void dev_upload(Dev *d, void *dst, const void *host, size_t bytes);
void dev_download(Dev *d, void *host, const void *src, size_t bytes);
void dev_copy(Dev *d, void *dst, const void *src, size_t bytes);
void dev_zero(Dev *d, void *dst, size_t bytes);

// What memory is for. weights: parameters and biases; optimizer: moments, masters; activations: what a forward leaves for its
// backward; windows: rows received and sent; slots: copies of experts and their gradients; plans: demand, plans, routes;
// workspace: buffers that all layers share, and the backend's own.
typedef enum { MEMORY_WEIGHTS, MEMORY_GRADIENTS, MEMORY_OPTIMIZER, MEMORY_ACTIVATIONS, MEMORY_WINDOWS, MEMORY_SLOTS, MEMORY_PLANS,
               MEMORY_WORKSPACE, MEMORY_KINDS } MemoryKind;
extern const char *const memory_names[MEMORY_KINDS];
void dev_kind(Dev *d, MemoryKind k);                    // of what dev_alloc and comm_window take from here on
size_t dev_taken(Dev *d, size_t bytes[MEMORY_KINDS]);   // and not released, of this device and the groups bound to it (comm_bind); bytes
                                                        // overwritten unless NULL; returns the sum
// From begin to end nothing is taken: dev_alloc and comm_window count, and return what must not be touched; dev_upload,
// dev_copy and dev_zero do nothing. So the code that will take memory says beforehand how much.
void dev_count_begin(Dev *d);
void dev_count_end(Dev *d, size_t bytes[MEMORY_KINDS]);

// ---- a step that repeats -------------------------------------------------------------------------------------------
// From begin to end ops are recorded instead of run, with their arguments: pointers, sizes, numbers. dev_replay runs the record (a
// CUDA graph), once or many times. What differs from step to step lies in device memory; nothing in between may wait for the
// device. dev_record_begin returns 0 where ops are not recorded but run as ever (CPU).
int dev_record_begin(Dev *d);
void dev_record_end(Dev *d);
void dev_replay(Dev *d);

// ---- clock: where a step's time goes ------------------------------------------------------------------------------
typedef enum { STAGE_OTHER, STAGE_EMBED, STAGE_ATTENTION, STAGE_ROUTER, STAGE_COUNTS, STAGE_PLAN, STAGE_COPIES, STAGE_DISPATCH,
               STAGE_EXPERTS, STAGE_COMBINE, STAGE_HEAD, STAGE_REDUCE, STAGE_OPTIMIZER, STAGE_WAIT, STAGES } Stage;
extern const char *const stage_names[STAGES];
void dev_stage(Dev *d, Stage s);              // from here on, time belongs to s; returns nothing, costs a clock read
Stage dev_stage_now(const Dev *d);
void dev_stage_read(Dev *d, double ms[STAGES]); // milliseconds since the last read, and starts again from 0

// ---- dense products -----------------------------------------------------------------------------------------------
// y[m,n] = add[m,n] + sum_k x[m,k] w[n,k]     y (M,N) overwritten | add (M,N) or NULL, may be y | x (M,K) | w (N,K)
void dev_linear(Dev *d, real *y, const real *add, const real *x, const real *w, int M, int N, int K);
// dx[m,k] = add[m,k] + sum_n dy[m,n] w[n,k]   dx (M,K) overwritten | add (M,K) or NULL, may be dx | dy (M,N) | w (N,K)
void dev_linear_dx(Dev *d, real *dx, const real *add, const real *dy, const real *w, int M, int N, int K);
// dw[n,k] += sum_m dy[m,n] x[m,k]             dw (N,K) accumulates | dy (M,N) | x (M,K); m ascending
void dev_linear_dw(Dev *d, wide *dw, const real *dy, const real *x, int M, int N, int K);

// ---- grouped products: rows off[j]..off[j+1] belong to group j, off (J+1) on the device, off[J] <= M ---------------
// A group without rows is normal. w, dw: device tables of J pointers.
void dev_group_linear(Dev *d, real *y, const real *x, const real *const *w, const int *off, int J, int M, int N, int K);
void dev_group_linear_dx(Dev *d, real *dx, const real *dy, const real *const *w, const int *off, int J, int M, int N, int K);
void dev_group_linear_dw(Dev *d, wide *const *dw, const real *dy, const real *x, const int *off, int J, int M, int N, int K);

// ---- embedding, normalisation, residual ---------------------------------------------------------------------------
// y[t,:] = w[tok[t],:]                        y (BT,C) overwritten | w (V,C) | tok (BT) in 0..V-1
void dev_embed(Dev *d, real *y, const real *w, const int *tok, int BT, int C);
// dw[tok[t],:] += dy[t,:], t ascending        dw (V,C) accumulates
void dev_embed_bwd(Dev *d, wide *dw, const real *dy, const int *tok, int BT, int C);
// rstd[m] = 1/sqrt(mean_c x[m,c]^2 + eps); y[m,c] = x[m,c] rstd[m] w[c]        y (M,C), rstd (M) overwritten | w (C)
void dev_rmsnorm(Dev *d, real *y, wide *rstd, const real *x, const real *w, int M, int C, wide eps);
// dx = add + (dy*w - xn mean_c(dy*w*xn)) rstd with xn = x rstd; dw[c] += sum_m dy[m,c] xn[m,c], m ascending
// dx (M,C) overwritten, add (M,C) or NULL, may be dx | dw (C) accumulates
void dev_rmsnorm_bwd(Dev *d, real *dx, wide *dw, const real *add, const real *dy, const real *x, const real *w, const wide *rstd,
                     int M, int C);

// ---- attention ----------------------------------------------------------------------------------------------------
// QK-norm and half-split RoPE. qkv (BT, (NH+2NKV) HS) holds a token's NH query heads, then NKV key heads, then NKV value
// heads. Every query and key head: n = x / sqrt(mean x^2 + eps) * w (w (HS): wq for queries, wk for keys; both NULL = no
// norm), then out[j] = n[j] cos a - n[j+HS/2] sin a, out[j+HS/2] = n[j+HS/2] cos a + n[j] sin a,
// a = (pos0 + t) theta^(-2j/HS), computed in double. qk (BT, (NH+NKV) HS), rstd (BT, NH+NKV) overwritten.
void dev_qk_rope(Dev *d, real *qk, wide *rstd, const real *qkv, const real *wq, const real *wk, int B, int T, int pos0, int NH,
                 int NKV, int HS, double theta, wide eps);
// Its backward: the query and key part of dqkv (BT, (NH+2NKV) HS) overwritten, the value part untouched; dwq, dwk (HS)
// accumulate (NULL where wq, wk are), tokens ascending. pos0 = 0.
void dev_qk_rope_bwd(Dev *d, real *dqkv, wide *dwq, wide *dwk, const real *dqk, const real *qkv, const real *wq, const real *wk,
                     const wide *rstd, int B, int T, int NH, int NKV, int HS, double theta);

typedef struct AttnShape {
    int B, Tq, Tk;         // query i of a sequence stands at position Tk - Tq + i (training: Tq = Tk)
    int NH, NKV, HS;       // query head h reads key/value head h / (NH/NKV)
    int ldq, ldk, ldv;     // elements from one token's row of q, k, v to the next (o: NH*HS)
    size_t kv_seq;         // elements from one sequence's k to the next, and of its v; 0 = Tk*ldk and Tk*ldv
} AttnShape;
// o[i,h,:] = sum_{s = first..pos} softmax_s(q[i,h] . k[s] / sqrt(HS)) v[s]; first (B*Tq) the earliest position that a query
// sees (its document's start) or NULL = 0. Never a Tq x Tk matrix in memory. o (B*Tq, NH, HS), lse (B,NH,Tq) overwritten.
void dev_attention(Dev *d, real *o, wide *lse, const real *q, const real *k, const real *v, const int *first, AttnShape s);
// dq, dk, dv overwritten, with the row strides and layout of q, k, v; needs Tq = Tk.
void dev_attention_bwd(Dev *d, real *dq, real *dk, real *dv, const real *dout, const real *o, const wide *lse, const real *q,
                       const real *k, const real *v, const int *first, AttnShape s);

// ---- expert ------------------------------------------------------------------------------------------------------
// h[m,f] = rw[m] silu(g[m,f]) u[m,f]; gu (M,2F): g = gu[m,0..F), u = gu[m,F..2F)
// h (M,F) overwritten | rw (M) the row's routing weight, NULL = 1
void dev_swiglu(Dev *d, real *h, const real *gu, const wide *rw, const int *n_rows, int M, int F);
// dgu (M,2F), h (M,F; computed again for the down projection's gradient) overwritten | drw (M) overwritten with
// sum_f dh silu(g) u, NULL with rw. dgu may be gu.
void dev_swiglu_bwd(Dev *d, real *dgu, real *h, wide *drw, const real *dh, const real *gu, const wide *rw, const int *n_rows,
                    int M, int F);

// ---- router ------------------------------------------------------------------------------------------------------
typedef enum { ROUTER_SOFTMAX, ROUTER_SIGMOID } RouterScore;
typedef struct RouterShape {
    int BT, E, K;
    RouterScore score;
    int renorm;   // weights of the K chosen divided by their sum (+1e-20: seen only where all of them underflow)
    double scale; // then multiplied by this (routed_scaling_factor)
    int even;     // 1: not the K best, but experts (first + t + k (E/K)) mod E, whatever their scores
    int first;
} RouterShape;
// logits = x w^T in wide arithmetic, whatever `real` is: logits (BT,E) overwritten | x (BT,C) | w (E,C)
void dev_router_logits(Dev *d, wide *logits, const real *x, const real *w, int BT, int E, int C);
// score[t,e] = softmax or sigmoid of logits; idx[t,:] = the K largest of score + bias, largest first, ties to the lower
// index (s.even: the even choice); weight[t,k] = score of idx[t,k], never the biased one, renormalised and scaled.
// prob[t,:] = score / (sum_e score + 1e-20) (what the balance loss averages); lse[t] = log sum_e exp logits.
// A token with a non-finite logit gets experts 0..K-1 with weight 0, and *bad (int, device) becomes
// min over such tokens of t+1 where it was 0.
// idx, weight (BT,K), prob (BT,E), lse (BT) overwritten | bias (E) or NULL
void dev_route(Dev *d, int *idx, wide *weight, wide *prob, wide *lse, int *bad, const wide *logits, const wide *bias, RouterShape s);
// dlogits (BT,E) overwritten with the sum of three gradients:
//   through the weights (dweight (BT,K)); through the balance loss, d/dprob[t,e] = aux_scale * E * f[g,e] with g = t / (BT/n_groups),
//   f (n_groups,E; NULL = no such loss), held constant; through the z-loss z_scale * lse^2.
void dev_route_bwd(Dev *d, wide *dlogits, const wide *dweight, const int *idx, const wide *prob, const wide *lse, const wide *logits,
                   const wide *f, int n_groups, wide aux_scale, wide z_scale, RouterShape s);
// dx[t,:] += dlogits w (dx (BT,C) accumulates) and dw += dlogits^T x (dw (E,C) accumulates)
void dev_router_logits_bwd(Dev *d, real *dx, wide *dw, const wide *dlogits, const real *x, const real *w, int BT, int E, int C);
// Balance statistics per group of BT/n_groups tokens: f[g,e] = chosen pairs of e / (tokens K); p[g,e] = mean prob. Overwritten.
void dev_balance(Dev *d, wide *f, wide *p, const int *idx, const wide *prob, int BT, int E, int K, int n_groups);
// count[e] = pairs of e kept; seen[e] = pairs of e before any drop; ord[t*K+k] = how many kept pairs of the same expert come
// before it (tokens ascending, k ascending), -1 when dropped: at most `capacity` are kept per expert, 0 = no limit.
// count, seen (E), ord (BT,K) overwritten
void dev_route_count(Dev *d, int *count, int *seen, int *ord, const int *idx, int BT, int E, int K, int capacity);

// ---- rows between ranks: dispatch and combine, each other's backward ------------------------------------------------
// Where the pairs of tokens lie: pair k of token t at row row[t*ld+k] of entry peer[t*ld+k] of a table of buffers.
typedef struct RowMap {
    int BT, K, ld;          // tokens; pairs of each; elements from one token's pairs to the next
    const int *peer;        // NULL: entry 0, all of them
    const int *row;         // < 0: not here, skipped
    const int *wrow;        // the same for the pair's weight; NULL: as row
    const int *n; int room; // n NULL: all tokens. Else they come in blocks of `room`, of which only the first n[i] of block i
} RowMap;                   // are there (device ints); others are neither read nor written
// For every pair with row >= 0: dst[peer][row,:] = x[t,:]; with wrow >= 0: wdst[peer][wrow] = w[t,k] if w.
// dst, wdst: device tables of pointers | x (BT,C) | w (BT,K) or NULL
void dev_scatter_rows(Dev *d, real *const *dst, wide *const *wdst, const real *x, const wide *w, RowMap m, int C);
// y[t,:] = add[t,:] + sum_k src[peer][row,:], k ascending, pairs with row < 0 skipped; dw[t,k] = wsrc[peer][wrow] (0 where
// wrow < 0) if dw. y (BT,C), dw (BT,K) overwritten | add (BT,C) or NULL, may be y
void dev_gather_rows(Dev *d, real *y, wide *dw, const real *add, const real *const *src, const wide *const *wsrc, RowMap m, int C);
// x[i] += y[i]    x accumulates
void dev_add(Dev *d, wide *x, const wide *y, size_t n);

// ---- loss --------------------------------------------------------------------------------------------------------
// nll[m] = log sum_v exp logits[m,v] - logits[m,target[m]]; target -1: nll 0, no gradient.
// With grad: logits[m,v] becomes scale * (softmax - onehot). nll (M) overwritten | logits (M,V) | target (M)
void dev_cross_entropy(Dev *d, wide *nll, real *logits, const int *target, int M, int V, wide scale, int grad);
// out[0] += sum x[i], in double, in a fixed order; out is one double on the device
void dev_sum(Dev *d, double *out, const wide *x, size_t n);
void dev_sumsq(Dev *d, double *out, const wide *x, size_t n);
// out[0] += scale * sum_i x[i] y[i]
void dev_dot(Dev *d, double *out, const wide *x, const wide *y, size_t n, double scale);

// ---- optimizer ---------------------------------------------------------------------------------------------------
// *veto = NaN where *sum is not finite or one of bad (n; NULL: none) is not 0; else 0. Added to a sum of squares that all ranks share,
// it keeps all of them from an update.
void dev_veto(Dev *d, double *veto, const double *sum, const int *bad, int n);
void dev_total(Dev *d, double *x, int n); // x[0] += x[1] + ... + x[n-1], in this order
// *factor = norm > max_norm ? max_norm / norm : 1, norm = sqrt(*sumsq); max_norm <= 0 never clips; NaN where *sumsq is not finite
void dev_clip_factor(Dev *d, wide *factor, const double *sumsq, double max_norm);
typedef struct Update { // of one step: lies in device memory, so that a recorded step reads the present one
    double lr, beta1, beta2, eps, decay;
    int64_t step; // 1 for the first update
} Update;
// Where `real` is narrower than `wide`, updates are made to `master`, of which w is the rounded copy. Elsewhere w is its own
// master and `master` NULL.
// AdamW (Loshchilov & Hutter, 1711.05101) with g' = factor g: m, v and w updated; w -= lr (mhat/(sqrt(vhat)+eps) + decay w)
// A factor that is no number (dev_clip_factor) leaves all of them as they are.
void dev_adamw(Dev *d, real *w, wide *master, wide *m, wide *v, const wide *g, const wide *factor, size_t n, const Update *o);
// w -= lr (factor g + decay w), likewise
void dev_sgd(Dev *d, real *w, wide *master, const wide *g, const wide *factor, size_t n, const Update *o);
// y[i] = x[i]    y overwritten
void dev_widen(Dev *d, wide *y, const real *x, size_t n);
void dev_narrow(Dev *d, real *y, const wide *x, size_t n); // rounded to the nearest
// bias[e] += rate * sign(mean count - count[e]) (loss-free balancing, 2408.15664), unless *factor is no number; count (E) int64
void dev_bias_update(Dev *d, wide *bias, const int64_t *count, const wide *factor, int E, double rate);

// ---- initial values ------------------------------------------------------------------------------------------------
// w[i] = std * normal(seed, stream, first + i): the same whatever part of a tensor a rank holds
void dev_init_normal(Dev *d, real *w, size_t n, uint64_t seed, uint64_t stream, uint64_t first, double std);
void dev_fill(Dev *d, real *w, size_t n, double value);
#endif
