// What a run tells: a line per step on stdout, JSON lines in OUT/log.jsonl, load bars, the summary at the end.
//
// OUT/log.jsonl, one object a line, flushed each:
//   {"header": {...}}     once per start: everything needed to reproduce, and what each field means
//   {"resume": step, ...} where a run was continued
//   {"step": ..., ...}    after each step; a value that is not known or not a number is null
#ifndef MOE_LOG_H
#define MOE_LOG_H
#include "train/trainer.h"

// Rank 0. from: the step after which the log there goes on, without its lines of later steps; -1: a new log.
Log *log_open(const char *run, int64_t from);
void log_close(Log *l);
// The start table on stdout, and the header line.
void log_start(Log *l, const Trainer *t);
void log_resume(Log *l, const Trainer *t);
// val NULL: no evaluation after this step. Prints the step's line; with val also its line and the load bars.
void log_step(Log *l, const Trainer *t, const StepStats *s, const EvalStats *val);
void log_sample(const char *text, size_t n, int64_t step);
void log_room(MoeRoom now, const char *what); // receive buffers have grown, and what is run again
void log_checkpoint(const char *dir, double ms);
// peak_bytes: largest resident set of the ranks; checkpoint NULL: none was written
void log_summary(Log *l, const Trainer *t, const char *checkpoint, const char *why, double peak_bytes);
// One glyph per expert, 1.0 x mean the middle one; ASCII where the locale has no others. out: room for 4 E + 1 bytes.
void log_bars(char *out, const int64_t *seen, int E, int utf8);
#endif
