// What a rank's memory is taken for: the books that dev_alloc and comm_window of both backends keep (kernels/device.h).
#ifndef MOE_LEDGER_H
#define MOE_LEDGER_H
#include "kernels/device.h"

typedef struct Ledger {
    MemoryKind kind;   // of what is taken now
    int counting;      // nothing is taken, only counted
    size_t taken[MEMORY_KINDS], counted[MEMORY_KINDS]; // bytes
} Ledger;

Ledger *dev_ledger(Dev *d); // the backend's: of this rank's device
// Where memory would lie that is only counted: fit for arithmetic, not to be touched
#define NOWHERE ((void *)(uintptr_t)4096)

static inline void ledger_add(Ledger *l, size_t bytes) { (l->counting ? l->counted : l->taken)[l->kind] += bytes; }
static inline void ledger_back(Ledger *l, MemoryKind kind, size_t bytes) { l->taken[kind] -= bytes; }
// A table of `n` windows that are only counted; free() it
void **ledger_nowhere(int n);
#endif
