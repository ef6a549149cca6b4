"""Whether the native library's quick kernels compute what the plain ones do, on models made for the purpose."""
