#include "gil.h"

/* Multiply-adds that take less time than another thread loses by waiting for the GIL. */
#define SHORT_WORK 1e5

/* The state of a thread that has released the GIL; NULL while it holds it. */
static _Thread_local PyThreadState *saved;

void sdpa_gil_release(double work) { saved = work < SHORT_WORK ? NULL : PyEval_SaveThread(); }

int sdpa_gil_finish(sdpa_status status) {
    if (saved) PyEval_RestoreThread(saved);
    saved = NULL;
    if (status == SDPA_OK) return 0;
    if (status == SDPA_NO_MEMORY) {
        PyErr_NoMemory();
    } else if (PyErr_Occurred()) {
        /* A signal handler raised. */
    } else if (status == SDPA_FORKED) {
        PyErr_SetString(PyExc_RuntimeError, "call cancelled: a signal handler forked the process, and the threads that "
                                            "computed exist in the parent only");
    } else {
        /* The pool was closed: the interpreter is shutting down and this is a daemon thread. SystemExit ends such a
         * thread without a traceback, which any other exception would print after the program has finished. Waiting
         * here instead would block whoever joins the thread at exit. */
        PyErr_SetString(PyExc_SystemExit, "call cancelled: the interpreter is shutting down");
    }
    return -1;
}

int sdpa_interrupted(void) {
    PyThreadState *released = saved;
    saved = NULL; /* a signal handler may call this module */
    if (released) PyEval_RestoreThread(released);
    const int raised = PyErr_CheckSignals();
    if (released) saved = PyEval_SaveThread();
    return raised;
}
