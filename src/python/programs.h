/* score_mod and mask_mod: from functions of Python, by sdpa._programs, to programs of a problem, their arguments'
 * tangents and gradients. */
#ifndef SDPA_PYTHON_PROGRAMS_H
#define SDPA_PYTHON_PROGRAMS_H

#include "call.h"

/* Traces the functions that the options name; the caller's code may run. The call owns what it makes. -1 and an
 * exception on failure. */
int sdpa_programs_prepare(sdpa_call *call);

/* Makes plain views of the arrays, as sdpa_settle. Runs no code of the caller's. */
int sdpa_programs_settle(sdpa_call *call);

/* Sets the problem's programs, after its sizes, type and offsets. */
int sdpa_programs_set(sdpa_call *call);

/* Reads score_args_t or gg_score_args. */
int sdpa_programs_set_tangents(sdpa_call *call);

/* Makes the gradients of score_args where they are needed: a tuple, whose arrays sdpa_programs_finish fills. NULL with
 * an exception on failure. */
PyObject *sdpa_programs_gradients(sdpa_call *call);

/* After a run: IndexError and -1 for an index out of range; else fills the gradients. */
int sdpa_programs_finish(sdpa_call *call);

void sdpa_programs_release(sdpa_call *call);

#endif
