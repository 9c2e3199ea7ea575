#include "topoep/loads.h"
#include "kernels/check.h"
#include "kernels/files.h"
#include "topoep/plan.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

// A row of counts; returns how many the line holds, of which at most E are stored
static int row_parse(int *row, char *text, int E, const char *path, int line) {
    int n = 0;
    for (char *word; (word = strsep(&text, " \t\r"));) {
        if (!*word) continue;
        char *end;
        errno = 0;
        long long x = strtoll(word, &end, 10);
        CHECK_DATA(!errno && !*end && x >= 0 && x <= INT32_MAX, "%s:%d: '%s', expected a number of pairs from 0 to %d", path, line, word, INT32_MAX);
        if (n < E) row[n] = (int)x;
        n++;
    }
    return n;
}

int *loads_read(const char *path, int *R, int *E) {
    size_t bytes;
    char *text = file_read(path, &bytes), *rest = text;
    CHECK_DATA(strlen(text) == bytes, "%s holds a zero byte at %zu, expected text", path, strlen(text));
    int *D = NULL, line = 0, rows = 0;
    int64_t total = 0;
    for (char *row; (row = strsep(&rest, "\n"));) {
        line++;
        row[strcspn(row, "#")] = '\0';
        if (!row[strspn(row, " \t\r")]) continue;
        if (!D) {
            int end = 0;
            CHECK_DATA(sscanf(row, " ranks %9d experts %9d %n", R, E, &end) == 2 && end > 0 && !row[end], "%s:%d: '%s', expected: ranks R experts E", path, line, row);
            CHECK_DATA(*R > 0 && *E > 0 && *R <= PLAN_MAX_R && *E <= PLAN_MAX_E && *E % *R == 0,
                       "%s:%d: %d ranks, %d experts, expected at most %d and %d, and an even share for each rank", path, line, *R, *E, PLAN_MAX_R, PLAN_MAX_E);
            D = host_alloc(SIZE(*R, *E, sizeof(int)));
            continue;
        }
        CHECK_DATA(rows < *R, "%s:%d: a row too many, expected %d", path, line, *R);
        int *at = D + SIZE(rows++, *E), n = row_parse(at, row, *E, path, line);
        CHECK_DATA(n == *E, "%s:%d: %d counts, expected %d", path, line, n, *E);
        for (int e = 0; e < *E; e++) total += at[e];
    }
    CHECK_DATA(D, "%s is empty, expected a line: ranks R experts E", path);
    CHECK_DATA(rows == *R, "%s: %d rows, expected %d", path, rows, *R);
    CHECK_DATA(total <= INT32_MAX, "%s: %lld pairs in all, expected at most %d", path, (long long)total, INT32_MAX);
    free(text);
    return D;
}
