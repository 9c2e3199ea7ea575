#include "topoep/replay_run.h"
#include "kernels/check.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *replay_name(int row) { return row == REPLAY_UNIFORM ? "uniform" : policy_names[row]; }
int replay_plans(int row) { return row != REPLAY_UNIFORM && row != POLICY_NONE && row != POLICY_EPLB; }
int replay_gathers(int row) { return row != REPLAY_UNIFORM && row != POLICY_NONE; }

// ---- sums -----------------------------------------------------------------------------------------------------------------
static void add_time(LayerTime *sum, const LayerTime *t) {
    sum->counts += t->counts, sum->plan += t->plan, sum->compute += t->compute, sum->tokens += t->tokens;
    sum->weights += t->weights, sum->fixed += t->fixed, sum->straggler += t->straggler;
}

static void add_bytes(Bytes *sum, Bytes b) {
    sum->self += b.self, sum->node += b.node, sum->inter += b.inter;
    sum->weights_node += b.weights_node, sum->weights_inter += b.weights_inter;
}

static void row_add(ReplayRow *r, const TimeModel *m, const Planner *p, const LayerTime *t, Traffic traffic) {
    const PlanInfo *a = &p->info;
    if (r->n == r->room) {
        int64_t room = r->room ? 2 * r->room : 1024, *more = host_alloc(SIZE(room, sizeof *more));
        if (r->n) memcpy(more, r->layer_ps, SIZE(r->n, sizeof *more));
        free(r->layer_ps);
        r->layer_ps = more, r->room = room;
    }
    r->layer_ps[r->n++] = times_total(t);
    add_time(&r->sum, t);
    add_bytes(&r->bytes, times_bytes(a, traffic, m));
    r->copies += a->copies, r->with_copies += a->copies > 0;
    r->cpu_us += p->plan_us, r->cpu_us_max = fmax(r->cpu_us_max, p->plan_us);
    if (a->total == 0) return;
    double mean = (double)a->total / m->R, before = (double)a->max_load_before / mean, after = (double)a->max_load / mean;
    r->measured++;
    r->before += before, r->after += after;
    r->before_max = fmax(r->before_max, before), r->after_max = fmax(r->after_max, after);
}

static void compare(ReplayRow *r, const PlanInfo *now, const PlanInfo *then) {
    r->recorded++;
    r->same_hash += now->hash == then->hash;
    r->same_pairs += now->pairs_self == then->pairs_self && now->pairs_node == then->pairs_node &&
    now->pairs_inter == then->pairs_inter
                  && now->inter_copies + now->node_copies == then->inter_copies;
}

// ---- a trace's times ------------------------------------------------------------------------------------------------------
// Stages of an MoE layer that the model stands for; waiting is mostly theirs
static int stage_is_moe(const char *name) {
    static const char *const names[] = {"counts", "plan", "copies", "dispatch", "experts", "combine", "wait"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) return 1;
    return 0;
}

static void add_measured(Replay *a, const TraceHeader *h, const Sample *s) {
    for (int i = 0; i < h->stages; i++) {
        double ms = 0;
        for (int r = 0; r < s->ranks; r++) ms += (double)s->ms[r * h->stages + i] / s->ranks;
        a->measured_stage_ms[i] += ms;
        *(stage_is_moe(h->stage[i]) ? &a->measured_ms : &a->measured_other_ms) += ms;
    }
    a->times++;
}

// ---- the run --------------------------------------------------------------------------------------------------------------
typedef struct Run {
    Replay *a;
    Planner planner;
    RankSums sums;
    int *even;
    int64_t *history; // (groups, layers, E)
    int layers, recorded; // recorded: the policy of the trace's run, -1 = none known
    ReplaySeen seen;
    void *to;
} Run;

// With a past that is never the present: no copies in a layer's first sample, which is nothing but the past of the next one.
static void solve_eplb(Run *u, const Sample *s, PlanOptions how) {
    int E = u->a->m.E;
    int64_t *history = u->history + ((int64_t)s->group * u->layers + s->layer) * E, past = 0;
    for (int e = 0; e < E; e++) past |= history[e];
    planner_solve(&u->planner, s->D, how, history);
    if (past) return;
    how.policy = POLICY_NONE;
    planner_solve(&u->planner, s->D, how, NULL);
}

static void see_heat(Replay *a, const Sample *s) {
    int R = a->m.R, E = a->m.E;
    int64_t all = 0, *of = host_alloc(SIZE(E, sizeof *of));
    for (int i = 0; i < R * E; i++) of[i % E] += s->D[i], all += s->D[i];
    for (int e = 0; e < E && all > 0; e++) {
        double ratio = (double)of[e] * E / (double)all;
        if (ratio > a->hot_ratio) a->hot_ratio = ratio, a->hot_expert = e, a->hot_layer = s->layer, a->hot_step = s->step;
    }
    free(of);
}

static void run_sample(Run *u, const Sample *s, const int *rows) {
    Replay *a = u->a;
    const TimeModel *m = &a->m;
    for (int row = 0; row < REPLAY_ROWS; row++) {
        if (!rows[row]) continue;
        PlanOptions how = a->how;
        how.policy = row == REPLAY_UNIFORM ? POLICY_NONE : (Policy)row;
        const int *D = s->D;
        if (row == REPLAY_UNIFORM) demand_even(u->even, D, m->R, m->E), D = u->even;
        if (row == POLICY_EPLB) solve_eplb(u, s, how);
        else planner_solve(&u->planner, D, how, NULL);
        times_sums(&u->sums, D, u->planner.quota, m);
        LayerTime t = times_layer(&u->planner.info, &u->sums, m, replay_plans(row), replay_gathers(row));
        const PlanInfo *plan = &u->planner.info;
        const TraceRecord *then = row == u->recorded ? s->recorded : NULL;
        int same = then && plan->hash == then->plan.hash; // then what crossed is known
        row_add(&a->row[row], m, &u->planner, &t, same ? (Traffic){then->crossings, then->passed_on} : times_traffic(plan, m));
        if (then) compare(&a->row[row], plan, &then->plan);
        if (u->seen) u->seen(u->to, row, s, &t, &u->sums);
    }
}

void replay_run(Replay *a, Source *s, const TimeModel *m, PlanOptions how, const int *rows, int64_t warm, ReplaySeen seen, void *to) {
    *a = (Replay){.m = *m, .how = how, .groups = s->h.groups};
    for (int row = 0; row < REPLAY_ROWS; row++) a->row[row].used = rows[row];
    Run u = {.a = a, .layers = s->h.layers, .recorded = -1, .seen = seen, .to = to};
    for (int i = 0; i < POLICIES; i++)
        if (s->trace && strcmp(s->h.policy, policy_names[i]) == 0) u.recorded = i;
    planner_open(&u.planner, &m->cost, m->E);
    u.sums = times_sums_alloc(m->R, m->cost.N);
    u.even = host_alloc(SIZE(m->R, m->E, sizeof(int)));
    u.history = host_alloc(SIZE(s->h.groups, s->h.layers, m->E, sizeof(int64_t)));
    Sample sample;
    int64_t last = -1, begun = 0;
    while (source_next(s, &sample)) {
        if (sample.kind == TRACE_TIMES) {
            add_measured(a, &s->h, &sample);
            continue;
        }
        begun += sample.step != last, last = sample.step;
        if (begun <= warm && rows[POLICY_EPLB]) solve_eplb(&u, &sample, (PlanOptions){.policy = POLICY_EPLB, .block = 1});
        if (begun <= warm) continue;
        see_heat(a, &sample);
        run_sample(&u, &sample, rows);
    }
    a->steps = begun > warm ? begun - warm : 0;
    planner_close(&u.planner);
    times_sums_free(&u.sums);
    free(u.even), free(u.history);
}

void replay_free(Replay *a) {
    for (int row = 0; row < REPLAY_ROWS; row++) free(a->row[row].layer_ps);
}

static int by_size(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

double replay_quantile_ms(const ReplayRow *r, double q) {
    if (r->n == 0) return NAN;
    int64_t *sorted = host_alloc(SIZE(r->n, sizeof *sorted)), at = (int64_t)ceil(q * (double)r->n) - 1;
    memcpy(sorted, r->layer_ps, SIZE(r->n, sizeof *sorted));
    qsort(sorted, (size_t)r->n, sizeof *sorted, by_size);
    double ms = 1e-9 * (double)sorted[at < 0 ? 0 : at];
    free(sorted);
    return ms;
}

double replay_step_ms(const Replay *a, int row) {
    return a->steps ? 1e-9 * (double)times_total(&a->row[row].sum) / (double)(a->steps * a->groups) : NAN;
}
