#include "kernels/ledger.h"
#include "kernels/check.h"
#include <string.h>

const char *const memory_names[MEMORY_KINDS] = {"weights", "gradients", "optimizer", "activations", "windows", "slots", "plans", "workspace"};

void dev_kind(Dev *d, MemoryKind k) { dev_ledger(d)->kind = k; }

size_t dev_taken(Dev *d, size_t bytes[MEMORY_KINDS]) {
    const Ledger *l = dev_ledger(d);
    size_t sum = 0;
    for (int k = 0; k < MEMORY_KINDS; k++) sum += l->taken[k];
    if (bytes) memcpy(bytes, l->taken, sizeof l->taken);
    return sum;
}

void dev_count_begin(Dev *d) {
    Ledger *l = dev_ledger(d);
    memset(l->counted, 0, sizeof l->counted);
    l->counting = 1;
}

void dev_count_end(Dev *d, size_t bytes[MEMORY_KINDS]) {
    Ledger *l = dev_ledger(d);
    l->counting = 0;
    memcpy(bytes, l->counted, sizeof l->counted);
}

void **ledger_nowhere(int n) {
    void **table = host_alloc(SIZE(n, sizeof *table));
    for (int i = 0; i < n; i++) table[i] = NOWHERE;
    return table;
}
