"""Lets threadpoolctl, if it is installed, see and set the threads of sdpa."""

from sdpa import _core


def register() -> None:
    """Register with threadpoolctl, so that `threadpool_limits(1)` applies to sdpa as well.

    This imports threadpoolctl: if imported later, it would not look for controllers.
    """
    try:
        from threadpoolctl import LibController, register
    except ImportError:  # not installed, or older than its registry
        return

    class SdpaController(LibController):
        """The thread pool of sdpa, as threadpoolctl finds it among the loaded libraries."""

        user_api = "sdpa"
        internal_api = "sdpa"
        filename_prefixes = ("_core",)
        check_symbols = ("sdpa_get_num_threads", "sdpa_set_num_threads")

        def get_num_threads(self) -> int:
            return int(self.dynlib.sdpa_get_num_threads())

        def set_num_threads(self, num_threads: int) -> None:
            # C cuts what does not fit into its int.
            self.dynlib.sdpa_set_num_threads(min(num_threads, 2**31 - 1))

        def get_version(self) -> str:
            return _core.__version__

    register(SdpaController)
