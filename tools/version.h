// The program's version, git revision, compiler and libraries as text.
#pragma once
#include <string>

namespace triad {

std::string version_text();       // several lines: version, revision, compiler, CUDA
std::string version_and_parts();  // also the optional parts that can be used here, for --version
std::string git_revision();       // the build's commit; empty if not built in a repository

}  // namespace triad
