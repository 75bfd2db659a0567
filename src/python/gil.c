#include "gil.h"

/* Multiply-adds that take less time than another thread loses by waiting for the GIL. */
#define SHORT_WORK 1e5

PyThreadState *sdpa_gil_release(double work) { return work < SHORT_WORK ? NULL : PyEval_SaveThread(); }

int sdpa_gil_finish(PyThreadState *released, sdpa_status status) {
    if (released) PyEval_RestoreThread(released);
    if (status == SDPA_OK) return 0;
    if (status == SDPA_NO_MEMORY) {
        PyErr_NoMemory();
    } else if (!PyErr_Occurred()) {
        /* No signal handler raised, so the pool was closed: the interpreter is shutting down and this is a daemon
         * thread. SystemExit ends such a thread without a traceback, which any other exception would print after the
         * program has finished. Waiting here instead would block whoever joins the thread at exit. */
        PyErr_SetString(PyExc_SystemExit, "call cancelled: the interpreter is shutting down");
    }
    return -1;
}

int sdpa_interrupted(void) {
    PyGILState_STATE gil = PyGILState_Ensure();
    int raised = PyErr_CheckSignals();
    PyGILState_Release(gil);
    return raised;
}
