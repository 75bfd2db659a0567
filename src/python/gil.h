/* Releasing the GIL for the work of a call, and raising the exception for its status. */
#ifndef SDPA_GIL_H
#define SDPA_GIL_H

#include "binding.h"

/* Releases the GIL for work of about this many multiply-adds, and keeps it when the work is shorter than a hand-over. */
void sdpa_gil_release(double work);

/* Takes the GIL back if it was released. 0 for SDPA_OK; else -1 and the exception that `status` stands for. */
int sdpa_gil_finish(sdpa_status status);

/* For problem.interrupted, between the two: runs the signal handlers, with the GIL; non-zero if one raised. */
int sdpa_interrupted(void);

#endif
