// The run folder: which one, and that nothing in it is lost by mistake.
#ifndef MOE_FOLDER_H
#define MOE_FOLDER_H
#include "train/options.h"

// The folder of a run; free() the path. Only looks. One rank calls it.
// A new run (checkpoint NULL): --out, or runs/MODEL-001 or the next free number. It must be empty or not exist, or else
// --overwrite be given (STATUS_USAGE).
// A continued one: --out as above, or, without it, the checkpoint's own run folder, which must hold no newer checkpoint;
// *append: the log there goes on.
char *folder_choose(const Options *o, const char *checkpoint, int *append);
// Makes it, with --overwrite after removing what an earlier run left there, and no other file. What folder_choose saw is looked at
// again, as other runs may have begun since: a numbered folder that one of them took makes *path the next free one.
// Returns a descriptor that holds a lock on the folder, so that no second run writes into it; close() it when the run has ended.
int folder_make(const Options *o, const char *checkpoint, char **path, int append);
#endif
