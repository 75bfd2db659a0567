/* The sizes of wasm32 in place of those of this machine, in the headers of its Python and NumPy. */
#if __has_include(<numpy/numpyconfig.h>)
#include <pyconfig.h>
#include <numpy/numpyconfig.h>
#undef SIZEOF_LONG
#define SIZEOF_LONG 4
#undef SIZEOF_SIZE_T
#define SIZEOF_SIZE_T 4
#undef SIZEOF_VOID_P
#define SIZEOF_VOID_P 4
#undef SIZEOF_UINTPTR_T
#define SIZEOF_UINTPTR_T 4
#undef NPY_SIZEOF_LONG
#define NPY_SIZEOF_LONG 4
#undef NPY_SIZEOF_PY_INTPTR_T
#define NPY_SIZEOF_PY_INTPTR_T 4
#undef NPY_SIZEOF_INTP
#define NPY_SIZEOF_INTP 4
#undef NPY_SIZEOF_UINTP
#define NPY_SIZEOF_UINTP 4
#endif
