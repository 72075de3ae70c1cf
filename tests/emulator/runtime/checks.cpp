// What g++ -fsanitize=alignment,bounds calls when a check fails; libubsan is not linked.
#include "internal.hpp"

namespace {
struct Place { const char* file; uint32_t line, column; };
struct TypeName { uint16_t kind, info; char name[1]; };
struct Mismatch { Place place; const TypeName* type; uint8_t log_align, access; };
struct OutOfBounds { Place place; const TypeName *array, *index; };
}  // namespace
extern "C" {
void __ubsan_handle_type_mismatch_v1(Mismatch* d, uintptr_t p) {
  emu::fail("misaligned access: %s at an address that is no multiple of %d (%s), line %u of %s", d->type->name, 1 << d->log_align,
            emu::describe_address((void*)p).c_str(), d->place.line, d->place.file);
}
void __ubsan_handle_out_of_bounds(OutOfBounds* d, uintptr_t i) {
  emu::fail("index %ld is out of bounds of the array %s, line %u of %s", (long)i, d->array->name, d->place.line, d->place.file);
}
}
