/* Releasing the GIL for the work of a call, and raising the exception for its status. */
#ifndef SDPA_GIL_H
#define SDPA_GIL_H

#include "binding.h"

/* Releases the GIL for work of about this many multiply-adds. Returns NULL, and keeps it, when the work is shorter than
 * a hand-over. */
PyThreadState *sdpa_gil_release(double work);

/* Takes the GIL back if `released` is not NULL. 0 for SDPA_OK; else -1 and the exception that `status` stands for. */
int sdpa_gil_finish(PyThreadState *released, sdpa_status status);

/* For problem.interrupted: takes the GIL and runs the signal handlers; non-zero if one raised. */
int sdpa_interrupted(void);

#endif
