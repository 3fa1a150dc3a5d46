// Recognizes other programs' files by their first bytes, so that an error can say what a file is.
#pragma once
#include <cstddef>
#include <string_view>

namespace triad {

inline constexpr size_t kFormatBytes = 512;  // bytes that suffice to recognize every format

// What a file is whose content is reached only through another program: a git-lfs pointer, or a compression or archive
// that Triad does not read. Empty for anything else. head: the file's first kFormatBytes bytes, or the whole of a
// shorter one.
std::string_view packed_format(std::string_view head);
// packed_format(), and also files that are neither text, weights nor token shards: images, databases, pickles, UTF-16.
std::string_view foreign_format(std::string_view head);

}  // namespace triad
