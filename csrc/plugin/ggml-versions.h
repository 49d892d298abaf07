#pragma once

// The range of ggml releases (0.MINOR.x) whose backend interface structs, tensor layout and operation numbers are those
// of the headers this library is compiled with. docs/compatibility.md says how the range was found.

#define KVT_GGML_VERSION_MINOR_MIN 15
#define KVT_GGML_VERSION_MINOR_MAX 25
