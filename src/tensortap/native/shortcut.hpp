#pragma once

#include <nanobind/nanobind.h>

namespace tensortap {

void bind_shortcut(nanobind::module_& m);

}  // namespace tensortap
