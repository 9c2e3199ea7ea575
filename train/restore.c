// Reading checkpoints: see checkpoint.h.
#include "kernels/check.h"
#include "kernels/files.h"
#include "train/checkpoint.h"
#include "train/tensors.h"
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 1 << 20, NAMED = 3 }; // elements read at a time; tensors named in a message

// The files of model.safetensors or optimizer.safetensors, one or several with an index.
typedef struct Set {
    StFile **file;
    int n;
    char *where;    // for messages
} Set;

static void set_add(Set *s, const char *dir, const char *name) {
    CHECK_DATA(*name && !strchr(name, '/'), "%s: \"weight_map\" names the file \"%s\", expected a plain name", s->where, name);
    char *path = path_join(dir, name);
    for (int i = 0; i < s->n; i++)
        if (strcmp(s->file[i]->path, path) == 0) {
            free(path);
            return;
        }
    s->file = realloc(s->file, SIZE(s->n + 1, sizeof *s->file));
    CHECK_DEVICE(s->file, "no memory for a list of %d files", s->n + 1);
    s->file[s->n++] = st_open(path);
    free(path);
}

static Set set_open(const char *dir, const char *base) {
    char *single = str_format("%s.safetensors", base), *index = str_format("%s.index.json", single);
    Set s = {.where = path_join(dir, single)};
    char *index_path = path_join(dir, index);
    if (file_size(index_path) >= 0) {
        free(s.where);
        s.where = index_path;
        size_t n;
        char *text = file_read(index_path, &n);
        json_error_t e;
        json_t *j = json_loadb(text, n, JSON_REJECT_DUPLICATES, &e), *map = json_object_get(j, "weight_map"), *v;
        CHECK_DATA(json_is_object(map), "%s: %s", index_path, j ? "\"weight_map\" is missing" : e.text);
        const char *key;
        json_object_foreach(map, key, v) {
            CHECK_DATA(json_is_string(v), "%s: \"weight_map\": %s has no file name", index_path, key);
            set_add(&s, dir, json_string_value(v));
        }
        json_decref(j);
        free(text);
    } else {
        set_add(&s, dir, single);
        free(index_path);
    }
    free(single), free(index);
    return s;
}

static void set_close(Set *s) {
    for (int i = 0; i < s->n; i++) st_close(s->file[i]);
    free(s->file);
    free(s->where);
}

static const StTensor *set_find(const Set *s, const char *name, const StFile **file) {
    const StTensor *found = NULL;
    for (int i = 0; i < s->n; i++) {
        const StTensor *t = st_find(s->file[i], name);
        CHECK_DATA(!t || !found, "%s: tensor %s is in two files, %s and %s", s->where, name, (*file)->path, s->file[i]->path);
        if (t) found = t, *file = s->file[i];
    }
    return found;
}

// Where a wanted tensor's elements are.
typedef struct Source {
    const StFile *file;
    const StTensor *t;
    int64_t first;
} Source;

static void check_shape(const StFile *f, const StTensor *t, const int64_t *shape, int n_dims) {
    int same = t->n_dims == n_dims;
    for (int i = 0; i < n_dims && same; i++) same = t->shape[i] == shape[i];
    if (same) return;
    StTensor want = {.n_dims = n_dims};
    memcpy(want.shape, shape, (size_t)n_dims * sizeof *shape);
    die(STATUS_DATA, __FILE__, __LINE__, "%s: tensor %s has shape %s, the model's is %s", f->path, t->name, st_shape_text(t), st_shape_text(&want));
}

// The name under which all experts' matrices of one kind are one tensor: "...mlp.experts.gate_up_proj". NULL for others.
static char *fused_name(const Tensor *w, int *up, int *down) {
    const char *format = w->piece->format, *second = strstr(format, "experts.%d.");
    if (w->expert < 0 || !second) return NULL;
    const char *kind = second + strlen("experts.%d.");
    *up = strncmp(kind, "up_", 3) == 0;
    *down = strncmp(kind, "down_", 5) == 0;
    char *prefix = str_format("%.*s", (int)(second - format) + 7, format), *head = str_format(prefix, w->param->layer);
    char *name = str_format("%s.%s", head, *down ? "down_proj" : "gate_up_proj");
    free(prefix), free(head);
    return name;
}

static Source find_fused(const Set *s, const Tensor *w, const char *suffix, int E, json_t *used) {
    int up = 0, down = 0;
    char *name = fused_name(w, &up, &down), *full = name ? str_format("%s%s", name, suffix) : NULL;
    Source src = {0};
    if (full) src.t = set_find(s, full, &src.file);
    if (src.t) {
        int64_t rows = w->piece->rows, cols = w->piece->cols, high = down ? rows : 2 * rows;
        check_shape(src.file, src.t, (int64_t[]){E, high, cols}, 3);
        src.first = (w->expert * high + (up ? rows : 0)) * cols;
        json_object_set_new(used, full, json_true());
    }
    free(name), free(full);
    return src;
}

static Source find_one(const Set *s, const Tensor *w, const char *suffix, int E, json_t *used) {
    char *name = str_format("%s%s", w->name, suffix);
    Source src = {0};
    src.t = set_find(s, name, &src.file);
    if (src.t) {
        check_shape(src.file, src.t, (int64_t[]){w->piece->rows, w->piece->cols}, w->piece->cols ? 2 : 1);
        json_object_set_new(used, name, json_true());
    } else {
        src = find_fused(s, w, suffix, E, used);
    }
    free(name);
    return src;
}

// Where a tensor's elements go: rounded to what products read, all of them (NULL: nowhere); in full width those from `first` on, n of
// them, that are kept here.
typedef struct Target {
    real *rounded;
    wide *whole;
    size_t first, n;
} Target;

static void upload(Dev *d, const Target *to, const Source *s, size_t n) {
    size_t at = to->rounded ? 0 : to->first, end = to->rounded ? n : to->first + to->n, most = n < CHUNK ? n : CHUNK, part;
    wide *buffer = host_alloc(most * sizeof(wide));
    real *raw = host_alloc(most * sizeof(real));
    for (; at < end; at += part) {
        part = end - at < CHUNK ? end - at : CHUNK;
        st_read(buffer, st_of_size(sizeof(wide)), s->file, s->t, s->first + (int64_t)at, (int64_t)part);
        for (size_t i = 0; i < part; i++) raw[i] = real_of(buffer[i]);
        if (to->rounded) dev_upload(d, to->rounded + at, raw, part * sizeof(real));
        size_t lo = to->first > at ? to->first : at, hi = to->first + to->n < at + part ? to->first + to->n : at + part;
        if (lo < hi) dev_upload(d, to->whole + (lo - to->first), buffer + (lo - at), (hi - lo) * sizeof(wide));
    }
    free(buffer), free(raw);
}

// "a, b, c and 12 more"
typedef struct Names {
    char *text;
    int n;
} Names;
static void names_add(Names *l, const char *name) {
    if (l->n++ >= NAMED) return;
    char *longer = l->text ? str_format("%s, %s", l->text, name) : str_format("%s", name);
    free(l->text);
    l->text = longer;
}
static char *names_text(const Names *l) {
    return l->n > NAMED ? str_format("%s and %d more", l->text, l->n - NAMED) : str_format("%s", l->text);
}

// Other ranks' experts: they need not be read here, but must be there, and are no left-overs.
static void check_others(const Set *s, const Params *ps, const char *suffix, int E, Names *missing, json_t *used) {
    for (int i = 0; i < ps->n; i++) {
        const Param *p = &ps->p[i];
        for (int e = 0; e < E && p->owner == OWNER_EXPERT; e++) {
            if (e >= p->first_expert && e < p->first_expert + p->n_experts) continue;
            for (int k = 0; k < p->n_pieces; k++) {
                Tensor w = {.name = tensor_name(&p->pieces[k], p->layer, e), .param = p, .piece = &p->pieces[k], .expert = e};
                if (!find_one(s, &w, suffix, E, used).t) names_add(missing, w.name);
                free(w.name);
            }
        }
    }
}

static void check_extra(const Set *s, json_t *used) {
    Names extra = {0};
    for (int i = 0; i < s->n; i++)
        for (int k = 0; k < s->file[i]->n; k++)
            if (!json_object_get(used, s->file[i]->tensor[k].name)) names_add(&extra, s->file[i]->tensor[k].name);
    CHECK_DATA(extra.n == 0, "%s: the model has no tensor %s (hint: does config.json belong to these files?)", s->where, names_text(&extra));
}

static Target target(const Params *ps, const Optimizer *opt, int moment, const Tensor *w, size_t n) {
    static const OptimizerState states[] = {STATE_MASTER, STATE_M, STATE_V};
    size_t at = (size_t)w->at;
    if (w->param->owner == OWNER_STATE) return (Target){.whole = param_state(ps, w->param) + at, .n = n};
    Target to = {.rounded = moment ? NULL : param_w(ps, w->param) + at};
    OptimizerPart own = opt ? optimizer_part(opt, ps, w->param) : (OptimizerPart){0};
    size_t lo = own.first > at ? own.first : at, hi = own.first + own.n < at + n ? own.first + own.n : at + n;
    if (lo >= hi || !own.state[states[moment]]) return to;
    to.whole = own.state[states[moment]] + (lo - own.first), to.first = lo - at, to.n = hi - lo;
    return to;
}

// moment: 0 the parameters themselves, 1 and 2 their moments
static void read_kind(const Set *s, Dev *d, const Params *ps, const Optimizer *opt, int moment, int E, json_t *used) {
    static const char *const suffixes[] = {"", ".exp_avg", ".exp_avg_sq"};
    Tensors list = tensors_list(ps, 1, 1);
    Names missing = {0};
    for (int i = 0; i < list.n; i++) {
        const Tensor *w = &list.t[i];
        if (moment && w->param->owner == OWNER_STATE) continue;
        Source src = find_one(s, w, suffixes[moment], E, used);
        if (!src.t) {
            char *name = str_format("%s%s", w->name, suffixes[moment]);
            names_add(&missing, name);
            free(name);
            continue;
        }
        size_t n = w->piece->cols ? SIZE(w->piece->rows, w->piece->cols) : SIZE(w->piece->rows);
        Target to = target(ps, opt, moment, w, n);
        upload(d, &to, &src, n);
    }
    check_others(s, ps, suffixes[moment], E, &missing, used);
    CHECK_DATA(missing.n == 0, "%s: tensor %s is missing", s->where, names_text(&missing));
    tensors_free(&list);
}

void checkpoint_read(const char *dir, Dev *d, const Params *ps, const ModelConfig *c, const Optimizer *opt) {
    Set s = set_open(dir, "model");
    json_t *used = json_object();
    read_kind(&s, d, ps, opt, 0, c->E, used);
    check_extra(&s, used);
    set_close(&s);
    json_decref(used);
    if (!opt || opt->kind != OPTIMIZER_ADAMW) return;
    s = set_open(dir, "optimizer");
    used = json_object();
    read_kind(&s, d, ps, opt, 1, c->E, used);
    read_kind(&s, d, ps, opt, 2, c->E, used);
    check_extra(&s, used);
    set_close(&s);
    json_decref(used);
}
