#pragma once

#include "ggml-api.h"

ggml_backend_dev_t kvt_device(void);
ggml_backend_reg_t kvt_registry(void);
