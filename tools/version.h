// The program's version, git revision, compiler and libraries.
#pragma once
#include <string>

namespace triad {

std::string version_text();  // several lines, for --version
std::string git_revision();  // commit of the build; empty if it was built outside of a repository

}  // namespace triad
