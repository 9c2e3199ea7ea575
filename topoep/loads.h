// Load files: a demand matrix as text. A line `ranks R experts E`, then R rows of E counts; # starts a comment.
#ifndef MOE_LOADS_H
#define MOE_LOADS_H
// Returns D (R,E), to be freed. Dies with STATUS_DATA, naming file and line.
int *loads_read(const char *path, int *R, int *E);
#endif
