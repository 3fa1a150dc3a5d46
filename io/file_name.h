// Whether a string is a file name in a folder, without a path.
#pragma once
#include <string_view>

namespace triad {

// False for a path, absolute or with folders, ".", ".." and "": joined to a folder, they would lead out of it or to it.
inline bool is_file_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\0", 2)) == std::string_view::npos;
}

}  // namespace triad
