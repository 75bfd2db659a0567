/* Calls that are interrupted at one of their steps after the other. */
#ifndef SDPA_INTERRUPTION_H
#define SDPA_INTERRUPTION_H

#include "../../src/problem.h"

/* What these calls ask. */
int poll_countdown(void);

/* Interrupts a call at its first poll, at its second, and so on, until it ends before; of more threads than one, whose
 * polls are many while they wait, at some of them. A call that was told to stop must say so, and no other. */
void check_interrupted(const char *what, int n_workers, sdpa_status (*run)(void *context), void *context);

#endif
