#include "train/checkpoint.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include "train/hf.h"
#include "train/tensors.h"
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CHUNK = 1 << 20 }; // elements on their way through host memory

// ---- folders ---------------------------------------------------------------------------------------------------------
static int remove_one(const char *path, const struct stat *st, int type, struct FTW *walk) {
    (void)st, (void)type, (void)walk;
    return remove(path);
}

void checkpoint_remove(const char *dir) {
    if (!file_is_dir(dir)) return;
    CHECK_DATA(nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS) == 0, "cannot remove %s: %s", dir, strerror(errno));
}

// "step_" and digits only; -1 for another name, such as that of an unfinished one
static int64_t step_of(const char *name) {
    if (strncmp(name, "step_", 5) != 0 || !name[5] || strlen(name) > 5 + 18) return -1;
    for (const char *at = name + 5; *at; at++)
        if (!isdigit((unsigned char)*at)) return -1;
    return atoll(name + 5);
}

static int has(const char *dir, const char *name) {
    char *path = path_join(dir, name);
    int there = file_size(path) >= 0;
    free(path);
    return there;
}

char *checkpoint_find(const char *path) {
    CHECK_DATA(file_is_dir(path), "%s is no folder, expected a run folder or a checkpoint (hint: --resume and --checkpoint take "
               "either)", path);
    if (has(path, "config.json")) return str_format("%s", path);
    DIR *dir = opendir(path);
    CHECK_DATA(dir, "cannot read folder %s: %s", path, strerror(errno));
    int64_t newest = -1;
    char *found = NULL;
    for (struct dirent *e; (e = readdir(dir));) {
        int64_t step = step_of(e->d_name);
        char *candidate = step > newest ? path_join(path, e->d_name) : NULL;
        if (candidate && has(candidate, "trainer.json")) {
            free(found);
            found = candidate;
            newest = step;
        } else {
            free(candidate);
        }
    }
    closedir(dir);
    CHECK_DATA(found, "%s holds no checkpoint, expected a folder step_N with trainer.json, or config.json for a checkpoint itself "
               "(hint: --save-every writes them)", path);
    return found;
}

static void remove_unfinished(const char *run) {
    DIR *dir = opendir(run);
    CHECK_DATA(dir, "cannot read folder %s: %s", run, strerror(errno));
    for (struct dirent *e; (e = readdir(dir));) {
        size_t n = strlen(e->d_name);
        if (strncmp(e->d_name, "step_", 5) != 0 || n < 4 || strcmp(e->d_name + n - 4, ".tmp") != 0) continue;
        char *path = path_join(run, e->d_name);
        checkpoint_remove(path);
        free(path);
    }
    closedir(dir);
}

// temporary becomes final; what final held before is gone afterwards. No moment without a whole `final`, where the file
// system can exchange two names.
static void publish(const char *temporary, const char *final, const char *run) {
    dir_sync(temporary);
    if (rename(temporary, final) != 0) {
        CHECK_DATA(errno == EEXIST || errno == ENOTEMPTY, "cannot rename %s to %s: %s", temporary, final, strerror(errno));
        if (renameat2(AT_FDCWD, temporary, AT_FDCWD, final, RENAME_EXCHANGE) != 0) {
            checkpoint_remove(final);
            CHECK_DATA(rename(temporary, final) == 0, "cannot rename %s to %s: %s", temporary, final, strerror(errno));
        }
        dir_sync(run);
        checkpoint_remove(temporary);
    }
    dir_sync(run);
}

// ---- writing ---------------------------------------------------------------------------------------------------------
static char *file_name(const char *base, int i, int n) {
    return n == 1 ? str_format("%s.safetensors", base) : str_format("%s-%05d-of-%05d.safetensors", base, i + 1, n);
}

// Before it is published: a checkpoint that is not finite would hide the last good one.
static void check_finite(const wide *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        CHECK_NUMERIC(isfinite(x[i]), "the parameters or the optimizer's state are not finite; no checkpoint was written (hint: resume from the last one with a lower --lr)");
}

static void append_wide(StWriter *w, Dev *d, const wide *src, size_t n) {
    wide *buffer = host_alloc((n < CHUNK ? n : CHUNK) * sizeof(wide));
    for (size_t at = 0; at < n;) {
        size_t part = n - at < CHUNK ? n - at : CHUNK;
        dev_download(d, buffer, src + at, part * sizeof(wide));
        check_finite(buffer, part);
        st_append(w, buffer, part * sizeof(wide));
        at += part;
    }
    free(buffer);
}

static void append_real(StWriter *w, Dev *d, const real *src, size_t n) {
    size_t most = n < CHUNK ? n : CHUNK;
    real *raw = host_alloc(most * sizeof(real));
    wide *buffer = host_alloc(most * sizeof(wide));
    for (size_t at = 0; at < n;) {
        size_t part = n - at < CHUNK ? n - at : CHUNK;
        dev_download(d, raw, src + at, part * sizeof(real));
        for (size_t i = 0; i < part; i++) buffer[i] = (wide)real_value(raw[i]);
        check_finite(buffer, part);
        st_append(w, buffer, part * sizeof(wide));
        at += part;
    }
    free(raw), free(buffer);
}

static size_t piece_elements(const Piece *p) { return p->cols ? SIZE(p->rows, p->cols) : SIZE(p->rows); }

// The ranks that hold a tensor; the first of them writes it.
static Comm *holders(const Snapshot *s, const Tensor *t) {
    return t->param->owner == OWNER_STATE ? s->world : s->ps->arena[t->param->owner].ranks;
}
static int writes(const Snapshot *s, const Tensor *t) { return comm_info(holders(s, t))->rank == 0; }

// What the optimizer keeps of a tensor: chunk by chunk from the rank that keeps it to the one that writes, w (NULL elsewhere). All
// ranks that hold the tensor make the call.
static void append_state(StWriter *w, const Snapshot *s, const Tensor *t, OptimizerState state) {
    OptimizerPart own = optimizer_part(s->opt, s->ps, t->param);
    int rank = comm_info(holders(s, t))->rank;
    size_t begin = (size_t)t->at, end = begin + piece_elements(t->piece), n;
    wide *buffer = host_alloc((end - begin < CHUNK ? end - begin : CHUNK) * sizeof(wide));
    for (size_t at = begin; at < end; at += n) {
        size_t until;
        int holder = optimizer_holder(s->ps, t->param, at, &until);
        until = until < end ? until : end;
        n = until - at < CHUNK ? until - at : CHUNK;
        if (rank == holder) dev_download(s->d, buffer, own.state[state] + (at - own.first), n * sizeof(wide));
        comm_move(holders(s, t), buffer, n * sizeof(wide), holder, 0);
        if (!w) continue;
        check_finite(buffer, n);
        st_append(w, buffer, n * sizeof(wide));
    }
    free(buffer);
}

static void append_params(StWriter *w, const Snapshot *s, const Tensor *t) {
    size_t n = piece_elements(t->piece);
    if (t->param->owner != OWNER_STATE && s->opt && s->opt->state[STATE_MASTER][t->param->owner]) append_state(w, s, t, STATE_MASTER);
    else if (w && t->param->owner == OWNER_STATE) append_wide(w, s->d, param_state(s->ps, t->param) + t->at, n);
    else if (w) append_real(w, s->d, param_w(s->ps, t->param) + t->at, n);
}

static const char *const moments[2] = {".exp_avg", ".exp_avg_sq"};

// This rank's file of parameters, or of moments, and its share of what others write: all ranks go through the table together.
static void write_file(const Snapshot *s, const char *path, int optimizer) {
    Tensors list = tensors_list(s->ps, 1, 1);
    StTensor *h = host_alloc(SIZE(2, list.n, sizeof *h));
    int n = 0;
    for (int i = 0; i < list.n; i++) {
        const Tensor *t = &list.t[i];
        if (!writes(s, t) || (optimizer && t->param->owner == OWNER_STATE)) continue;
        for (int k = 0; k < (optimizer ? 2 : 1); k++) h[n++] = tensor_header(t, optimizer ? moments[k] : "", st_of_size(sizeof(wide)));
    }
    StWriter *w = n ? st_create(path, h, n) : NULL;
    for (int i = 0; i < list.n; i++) {
        const Tensor *t = &list.t[i];
        StWriter *to = writes(s, t) ? w : NULL;
        if (!optimizer) append_params(to, s, t);
        for (int k = 0; k < 2 && optimizer && t->param->owner != OWNER_STATE; k++) append_state(to, s, t, k ? STATE_V : STATE_M);
    }
    if (w) st_finish(w);
    for (int i = 0; i < n; i++) free(h[i].name);
    free(h);
    tensors_free(&list);
}

// Which file holds what, for every tensor of the model: rank 0 knows the other ranks' from the table.
static void write_index(const Snapshot *s, const char *dir, const char *base, int n_files, int optimizer) {
    json_t *map = json_object();
    int64_t total = 0;
    for (int i = 0; i < s->ps->n; i++) {
        const Param *p = &s->ps->p[i];
        int units = p->owner == OWNER_EXPERT ? s->c->E : 1;
        if (optimizer && p->owner == OWNER_STATE) continue;
        for (int u = 0; u < units; u++)
            for (int k = 0; k < p->n_pieces; k++)
                for (int j = 0; j < (optimizer ? 2 : 1); j++) {
                    char *plain = tensor_name(&p->pieces[k], p->layer, u), *name = str_format("%s%s", plain, optimizer ? moments[j] : "");
                    char *file = file_name(base, p->owner == OWNER_EXPERT ? u / p->n_experts : 0, n_files);
                    json_object_set_new(map, name, json_string(file));
                    total += (int64_t)(piece_elements(&p->pieces[k]) * sizeof(wide));
                    free(plain), free(name), free(file);
                }
    }
    json_t *j = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)total, "weight_map", map);
    char *name = str_format("%s.safetensors.index.json", base), *path = path_join(dir, name), *text = json_dumps(j, JSON_INDENT(2));
    file_write(path, text, strlen(text));
    json_decref(j);
    free(name), free(path), free(text);
}

static void write_json(const char *dir, const char *name, const json_t *j) {
    char *path = path_join(dir, name), *text = json_dumps(j, JSON_INDENT(2)), *line = str_format("%s\n", text);
    file_write(path, line, strlen(line));
    free(path), free(text), free(line);
}

static void write_descriptions(const Snapshot *s, const char *dir, const json_t *trainer) {
    int separator = tokenizer_separator(s->tokenizer);
    json_t *config = hf_config(s->c, s->aux_coef, separator);
    write_json(dir, "config.json", config);
    json_decref(config);
    json_t *generation = json_pack("{s:i, s:i, s:b}", "bos_token_id", separator, "eos_token_id", separator, "do_sample", 1);
    write_json(dir, "generation_config.json", generation);
    json_decref(generation);
    if (tokenizer_vocab(s->tokenizer) == s->c->V) tokenizer_write(s->tokenizer, dir);
    write_json(dir, "trainer.json", trainer);
}

char *checkpoint_write(const Snapshot *s, const char *run, int64_t step, const json_t *trainer) {
    char *final = str_format("%s/step_%08lld", run, (long long)step), *temporary = str_format("%s.tmp", final);
    int rank = comm_info(s->world)->rank, R = comm_info(s->ep)->size, n_files = s->ps->arena[OWNER_EXPERT].n ? R : 1;
    if (rank == 0) {
        remove_unfinished(run);
        dir_make(temporary);
    }
    comm_barrier(s->world);
    int adamw = s->opt && s->opt->kind == OPTIMIZER_ADAMW;
    for (int optimizer = 0; optimizer <= adamw; optimizer++) {
        char *name = file_name(optimizer ? "optimizer" : "model", rank, n_files), *path = path_join(temporary, name);
        write_file(s, path, optimizer);
        free(name), free(path);
    }
    comm_barrier(s->world);
    if (rank == 0) {
        if (n_files > 1) write_index(s, temporary, "model", n_files, 0);
        if (n_files > 1 && adamw) write_index(s, temporary, "optimizer", n_files, 1);
        write_descriptions(s, temporary, trainer);
        publish(temporary, final, run);
    }
    comm_barrier(s->world);
    free(temporary);
    return final;
}

json_t *checkpoint_trainer(const char *dir) {
    char *path = path_join(dir, "trainer.json");
    CHECK_DATA(file_size(path) >= 0, "%s is missing: %s holds a model but no state of a training run", path, dir);
    size_t n;
    char *text = file_read(path, &n);
    json_error_t e;
    json_t *j = json_loadb(text, n, JSON_REJECT_DUPLICATES, &e);
    CHECK_DATA(json_is_object(j), "%s: line %d: %s (expected a JSON object)", path, e.line, j ? "another kind of value" : e.text);
    free(text);
    free(path);
    return j;
}
