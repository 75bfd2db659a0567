/* Warnings of arguments that are valid and probably not meant. */
#ifndef SDPA_WARN_H
#define SDPA_WARN_H

#include "call.h"

/* Looks at the converted arguments of a call. Runs code of the caller's if it warns. -1 and an exception if a warning is
 * turned into one. */
int sdpa_call_warn(sdpa_call *call);

#endif
