// What single elements mean, and the sizes of the formats.

#include "core.hpp"

#include <cmath>
#include <cstring>
#include <limits>

namespace tensortap {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

double sign_of(unsigned byte) { return byte & 0x80 ? -1.0 : 1.0; }

// `mantissa` bits of fraction, exponents biased by `bias`; no special values.
double small_float(unsigned byte, int mantissa, int bias) {
  const unsigned magnitude = byte & 0x7f;
  const int exponent = int(magnitude >> mantissa);
  const unsigned fraction = magnitude & ((1u << mantissa) - 1);
  const double significand = exponent ? double(fraction + (1u << mantissa)) : double(fraction);
  return sign_of(byte) * std::ldexp(significand, (exponent ? exponent : 1) - bias - mantissa);
}

template <class T>
T element(const void* data, std::size_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * sizeof(T), sizeof(T));
  return value;
}

double half(unsigned bits) {
  const int exponent = int(bits >> 10) & 31;
  const unsigned fraction = bits & 1023;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return fraction ? kNan : sign * kInf;
  return sign * std::ldexp(exponent ? fraction + 1024.0 : double(fraction), (exponent ? exponent : 1) - 25);
}

double brain(unsigned bits) {
  const std::uint32_t wide = bits << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

}  // namespace

bool is_byte(int dtype) { return element_size(dtype) == 1; }

std::size_t element_size(int dtype) {
  switch (dtype) {
    case kFloat64: case kInt64: case kUint64: return 8;
    case kFloat32: case kInt32: case kUint32: return 4;
    case kFloat16: case kBfloat16: case kInt16: case kUint16: return 2;
    default: return 1;
  }
}

double decode_byte(int dtype, unsigned byte) {
  switch (dtype) {
    case kInt8: return double(static_cast<signed char>(byte));
    case kUint8: return double(byte);
    case kBool: return byte ? 1.0 : 0.0;
    case kFloat8E4M3FN: return (byte & 0x7f) == 0x7f ? kNan : small_float(byte, 3, 7);
    case kFloat8E5M2:
      if ((byte & 0x7f) == 0x7c) return sign_of(byte) * kInf;
      return (byte & 0x7f) > 0x7c ? kNan : small_float(byte, 2, 15);
    case kFloat8E4M3FNUZ: return byte == 0x80 ? kNan : small_float(byte, 3, 8);
    case kFloat8E5M2FNUZ: return byte == 0x80 ? kNan : small_float(byte, 2, 16);
    case kFloat8E8M0FNU: return byte == 0xff ? kNan : std::ldexp(1.0, int(byte) - 127);
    default: return kNan;
  }
}

double decode_element(int dtype, const void* data, std::size_t index) {
  switch (dtype) {
    case kFloat32: return element<float>(data, index);
    case kFloat64: return element<double>(data, index);
    case kFloat16: return half(element<std::uint16_t>(data, index));
    case kBfloat16: return brain(element<std::uint16_t>(data, index));
    case kInt16: return element<std::int16_t>(data, index);
    case kUint16: return element<std::uint16_t>(data, index);
    case kInt32: return element<std::int32_t>(data, index);
    case kUint32: return element<std::uint32_t>(data, index);
    case kInt64: return double(element<std::int64_t>(data, index));
    case kUint64: return double(element<std::uint64_t>(data, index));
    default: return decode_byte(dtype, element<unsigned char>(data, index));
  }
}

}  // namespace tensortap
