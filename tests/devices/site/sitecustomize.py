"""Gives llama.cpp devices that are no part of its build, in every Python process that has this folder on PYTHONPATH.

    LOCALRUN_TEST_RPC       libggml-rpc.so and the endpoints of its servers: PATH=HOST:PORT,HOST:PORT
    LOCALRUN_TEST_BACKEND   the path of another backend's library (libggml-vulkan.so)
    LOCALRUN_TEST_LOST      how a server that has ended is missed: `crash` ends whoever lists devices, else it is not
                            listed. A driver knows both ways
    LOCALRUN_TEST_STAGES    1 samples on devices in one stage, which llama.cpp does not keep: a control

They are registered as soon as llama_cpp is imported, so that nothing of the product knows of it.
"""

import ctypes
import importlib.abc
import importlib.util
import os
import socket
import sys


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "llama_cpp.llama_cpp":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _register(module._lib)
            if os.environ.get("LOCALRUN_TEST_STAGES") == "1":
                _sample_in_one_stage(module)

        spec.loader.exec_module = exec_module
        return spec


def _register(library):
    library.ggml_backend_reg_count()  # which registers what is linked
    backend = os.environ.get("LOCALRUN_TEST_BACKEND")
    if backend:
        library.ggml_backend_load.argtypes, library.ggml_backend_load.restype = [ctypes.c_char_p], ctypes.c_void_p
        assert library.ggml_backend_load(os.fsencode(backend)), f"{backend} cannot be loaded"
    path, _, endpoints = os.environ.get("LOCALRUN_TEST_RPC", "").partition("=")
    if endpoints:
        rpc = ctypes.CDLL(path)
        add = rpc.ggml_backend_rpc_add_server
        add.argtypes, add.restype = [ctypes.c_char_p], ctypes.c_void_p
        library.ggml_backend_register.argtypes = [ctypes.c_void_p]
        for endpoint in endpoints.split(","):
            if _is_there(endpoint) or ("--gpus" in sys.argv and os.environ.get("LOCALRUN_TEST_LOST") == "crash"):
                library.ggml_backend_register(add(endpoint.encode()))


def _is_there(endpoint):
    host, _, port = endpoint.partition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except OSError:
        return False
    return True


def _sample_in_one_stage(module):
    add = module.llama_sampler_chain_add

    def add_one(chain, sampler):
        is_second = module.llama_sampler_chain_n(chain) == 1 and _is_top_k(chain, 0) and _name(sampler) == "top-k"
        if not is_second:
            add(chain, sampler)

    def _name(sampler):
        return module.llama_sampler_name(sampler).decode()

    def _is_top_k(chain, index):
        return _name(module.llama_sampler_chain_get(chain, index)) == "top-k"

    module.llama_sampler_chain_add = add_one


if {"LOCALRUN_TEST_RPC", "LOCALRUN_TEST_BACKEND"} & os.environ.keys():
    sys.meta_path.insert(0, _Finder())
