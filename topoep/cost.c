// Cluster files: what a pair and a copy cost, given as such (a cost file) or derived from a machine's rates (a rates file).
//
// From rates, with PHI = flops, B_ib = inter_bytes_s, B_nv = intra_bytes_s, t, w, g = bytes of one element of a token row, a
// weight, a weight gradient:
//   pair_compute = 18 C F / PHI                     SwiGLU: 3 products of 2CF, once forward, twice backward
//   pair_inter   = delta 4 t C / (B_ib G)           4 passes: dispatch and combine, forward and backward, over the node's G ports
//   pair_intra   = 4 t C / B_nv
//   copy         = 3 C F (2w + g) / B               weights forward, weights again for backward, the gradient back;
//                                                   B = G B_ib (sliced over the node's ports) or B_ib between nodes, B_nv inside
//   delta = 1, or with dedup the share that is left when a token going to several experts of one node crosses once, under
//   uniform routing: (N-1) (1 - (1-1/N)^K) / (K (N-1)/N)
#include "kernels/check.h"
#include "kernels/files.h"
#include "topoep/cost.h"
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const policy_names[POLICIES] = {"none", "topoep", "eplb", "fastermoe", "llep", "echo", "lplb", "ultraep", "moonep"};

typedef struct Rates {
    int sliced, dedup;
    double flops, inter_bytes_s, intra_bytes_s; // grouped products; one rank's network port; one rank's link inside the node
} Rates;

// Round estimates for ranks on the cores of one ordinary machine, no measurements: a core's grouped products with a few dozen
// rows per expert, messages over shared memory in place of a network, copies through a window, a barrier or two.
static const Rates local_rates = {.flops = 35e9, .inter_bytes_s = 0.5e9, .intra_bytes_s = 2e9};
enum { LOCAL_FIXED_PS = 50000000 };
static const int64_t COPY_MAX_PS = 1000000000000000; // 1000 s

typedef struct Key {
    const char *name;
    int64_t *integer; // one of the two
    double *number;
    double min, max;
    int kind;         // in rates files, cost files, or optional
    int line;         // where it was given; 0 = not yet
} Key;
enum { KEY_RATES = 1, KEY_COST = 2, KEY_OPTIONAL = 4 };

static char *trim(char *s) {
    s += strspn(s, " \t\r");
    for (size_t n = strlen(s); n > 0 && strchr(" \t\r", s[n - 1]); n--) s[n - 1] = '\0';
    return s;
}

static void key_set(Key *k, const char *value, const char *path, int line) {
    char *end;
    errno = 0;
    if (k->integer) {
        long long x = strtoll(value, &end, 10);
        CHECK_DATA(!errno && end != value && !*end && (double)x >= k->min && (double)x <= k->max,
                   "%s:%d: %s = %s, expected an integer from %.0f to %.0f", path, line, k->name, value, k->min, k->max);
        *k->integer = x;
    } else {
        double x = strtod(value, &end);
        CHECK_DATA(!errno && end != value && !*end && x >= k->min && x <= k->max, // false for NaN as well
                   "%s:%d: %s = %s, expected a number from %g to %g", path, line, k->name, value, k->min, k->max);
        *k->number = x;
    }
    k->line = line;
}

// Fills the keys' values and `name` from the file. Returns KEY_RATES or KEY_COST: which of the two it is.
static int file_parse(Key *keys, char *name, size_t name_bytes, const char *path) {
    size_t bytes;
    char *text = file_read(path, &bytes), *rest = text;
    CHECK_DATA(strlen(text) == bytes, "%s holds a zero byte at %zu, expected text (key = value)", path, strlen(text));
    int line = 0, named = 0;
    for (char *row; (row = strsep(&rest, "\n")); ) {
        line++;
        row[strcspn(row, "#")] = '\0';
        row = trim(row);
        if (!*row) continue;
        char *equals = strchr(row, '=');
        CHECK_DATA(equals, "%s:%d: '%s', expected key = value", path, line, row);
        *equals = '\0';
        char *key = trim(row), *value = trim(equals + 1);
        if (!strcmp(key, "name")) {
            CHECK_DATA(!named, "%s:%d: a second 'name'", path, line);
            CHECK_DATA(*value && strlen(value) < name_bytes, "%s:%d: name '%s', expected 1 to %zu characters", path, line, value, name_bytes - 1);
            json_t *utf8 = json_string(value); // logs and plans are JSON
            CHECK_DATA(utf8, "%s:%d: 'name' is not UTF-8", path, line);
            json_decref(utf8);
            memcpy(name, value, strlen(value) + 1);
            named = 1;
            continue;
        }
        Key *k = keys;
        while (k->name && strcmp(k->name, key)) k++;
        CHECK_DATA(k->name, "%s:%d: unknown key '%s' (hint: the keys of a cluster file are listed in topoep/clusters/h800-4x8.conf)", path, line, key);
        CHECK_DATA(!k->line, "%s:%d: '%s' was given already in line %d", path, line, key, k->line);
        key_set(k, value, path, line);
    }
    free(text);
    CHECK_DATA(named, "%s: 'name' is missing", path);
    int kind = 0;
    for (Key *k = keys; k->name; k++)
        if (k->line && (k->kind == KEY_RATES || k->kind == KEY_COST)) {
            CHECK_DATA(!kind || kind == k->kind, "%s:%d: '%s' belongs to a %s file, but the lines before are of a %s file", path, k->line, k->name,
                       k->kind == KEY_COST ? "cost" : "rates", kind == KEY_COST ? "cost" : "rates");
            kind = k->kind;
        }
    CHECK_DATA(kind, "%s: expected the keys of a cost file (pair_compute_ps ...) or of a rates file (flops ...)", path);
    for (Key *k = keys; k->name; k++)
        CHECK_DATA(k->line || (k->kind & KEY_OPTIONAL) || !(k->kind & kind), "%s: '%s' is missing", path, k->name);
    return kind;
}

static int64_t pico(double seconds, double most, const char *what, const char *where) {
    CHECK_DATA(seconds >= 0 && seconds <= most, "%s: %s comes to %g s, expected at most %g s (hint: the rates, or the model's dimensions)",
               where, what, seconds, most);
    return llround(seconds * 1e12);
}

static void cost_derive(Cost *c, const Rates *a, const CostModel *m, const char *where) {
    double N = c->N, G = c->G, C = m->C, F = m->F, token_bytes = 4.0 * m->token_bytes * C;
    double copy_bytes = 3 * C * F * (2.0 * m->weight_bytes + m->grad_bytes);
    int dedup = m->dedup == DEDUP_FILE ? a->dedup : m->dedup == DEDUP_ON;
    if (dedup && c->N > 1) c->delta = N * (1 - pow(1 - 1 / N, m->K)) / m->K;
    c->pair_compute_ps = pico(18 * C * F / a->flops, 1, "pair_compute_ps", where);
    c->pair_intra_ps = pico(token_bytes / a->intra_bytes_s, 1, "pair_intra_ps", where);
    c->copy_intra_ps = pico(copy_bytes / a->intra_bytes_s, 1e3, "copy_intra_ps", where);
    c->pair_inter_ps = c->N > 1 ? pico(c->delta * token_bytes / (a->inter_bytes_s * G), 1, "pair_inter_ps", where) : 0;
    c->copy_inter_ps = c->N > 1 ? pico(copy_bytes / (a->inter_bytes_s * (a->sliced && !m->one_port ? G : 1)), 1e3, "copy_inter_ps", where) : 0;
}

// Nodes of R ranks, for a file that names none
static int cost_nodes(const char *path, int R, int G) {
    CHECK_USAGE(R > 0 && R % G == 0, "%s names no 'nodes', and %d ranks do not fill nodes of %d (hint: --nodes, a line 'nodes = N', or the number of ranks)",
                path, R, G);
    return R / G;
}

Cost cost_load(const char *path, CostModel m) {
    Cost c = {.name = "local machine", .N = m.N, .G = m.G, .S = 2, .plan_fixed_ps = LOCAL_FIXED_PS, .delta = 1};
    Rates rates = local_rates;
    int kind = KEY_RATES;
    if (path) {
        int64_t nodes = 0, ranks = 0, slots = 2, sliced = 0, dedup = 0, measured = 0;
        const double most = (double)COPY_MAX_PS, most_pair = 1e12; // the latter 1 s
        Key keys[] = {
            {"nodes", &nodes, NULL, 1, PLAN_MAX_R, KEY_OPTIONAL, 0},
            {"ranks_per_node", &ranks, NULL, 1, PLAN_MAX_R, KEY_RATES | KEY_COST, 0},
            {"slots", &slots, NULL, 0, PLAN_MAX_S, KEY_OPTIONAL, 0},
            {"measured", &measured, NULL, 0, 1, KEY_OPTIONAL, 0},
            {"pair_compute_ps", &c.pair_compute_ps, NULL, 0, most_pair, KEY_COST, 0},
            {"pair_inter_ps", &c.pair_inter_ps, NULL, 0, most_pair, KEY_COST, 0},
            {"pair_intra_ps", &c.pair_intra_ps, NULL, 0, most_pair, KEY_COST, 0},
            {"copy_inter_ps", &c.copy_inter_ps, NULL, 0, most, KEY_COST, 0},
            {"copy_intra_ps", &c.copy_intra_ps, NULL, 0, most, KEY_COST, 0},
            {"flops", NULL, &rates.flops, 1, 1e21, KEY_RATES, 0},
            {"inter_bytes_s", NULL, &rates.inter_bytes_s, 1, 1e18, KEY_RATES, 0},
            {"intra_bytes_s", NULL, &rates.intra_bytes_s, 1, 1e18, KEY_RATES, 0},
            {"sliced", &sliced, NULL, 0, 1, KEY_RATES, 0},
            {"dedup", &dedup, NULL, 0, 1, KEY_RATES, 0},
            {"overlap_permille", &c.overlap_permille, NULL, 0, 1000, KEY_RATES | KEY_COST, 0},
            {"plan_fixed_ps", &c.plan_fixed_ps, NULL, 0, most, KEY_RATES | KEY_COST, 0},
            {0},
        };
        kind = file_parse(keys, c.name, sizeof c.name, path);
        c.N = m.nodes ? m.nodes : (int)nodes, c.G = (int)ranks, c.S = (int)slots, c.measured = (int)measured;
        if (c.N == 0) c.N = cost_nodes(path, m.N * m.G, c.G);
        rates.sliced = (int)sliced, rates.dedup = (int)dedup;
    }
    if (m.slots >= 0) c.S = m.slots;
    if (kind == KEY_RATES) {
        CHECK_USAGE(c.N > 0 && c.G > 0 && m.C > 0 && m.F > 0 && m.K > 0,
                    "a cost from rates needs a topology and a model's dimensions; found %d nodes x %d ranks, C %d, F %d, K %d", c.N, c.G, m.C, m.F, m.K);
        cost_derive(&c, &rates, &m, path ? path : c.name);
    } else if (m.one_port) {
        CHECK_DATA(c.copy_inter_ps <= COPY_MAX_PS / c.G, "%s: copy_inter_ps = %lld over one of %d ports: more than %.0f ps", path,
                   (long long)c.copy_inter_ps, c.G, (double)COPY_MAX_PS);
        c.copy_inter_ps *= c.G;
    }
    return c;
}

void cost_check(const Cost *c, int N, int G, int E) {
    CHECK_USAGE(c->N == N && c->G == G, "cluster '%s' has %d nodes of %d ranks, running are %d of %d (hint: --cluster, --nodes, or the number of ranks)",
                c->name, c->N, c->G, N, G);
    int R = N * G;
    CHECK_USAGE(R <= PLAN_MAX_R && E <= PLAN_MAX_E && c->S >= 0 && c->S <= PLAN_MAX_S,
                "%d ranks, %d experts, %d slots: a plan is made for at most %d, %d, %d", R, E, c->S, PLAN_MAX_R, PLAN_MAX_E, PLAN_MAX_S);
    CHECK_USAGE(E % R == 0, "%d experts cannot be shared evenly by %d ranks", E, R);
}
