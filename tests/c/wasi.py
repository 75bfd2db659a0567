"""Runs a program for WASI: ``python tests/c/wasi.py PROGRAM ARGUMENTS``."""

import sys

from wasmtime import Engine, ExitTrap, Linker, Module, Store, WasiConfig

engine = Engine()
linker = Linker(engine)
linker.define_wasi()
config = WasiConfig()
config.argv = sys.argv[1:]
config.inherit_stdout()
config.inherit_stderr()
store = Store(engine)
store.set_wasi(config)
instance = linker.instantiate(store, Module.from_file(engine, sys.argv[1]))
try:
    instance.exports(store)["_start"](store)
except ExitTrap as end:
    sys.exit(end.code)
