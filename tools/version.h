// The program's version, git revision, compiler and libraries as text.
#pragma once
#include <string>

namespace triad {

std::string version_text();  // several lines, for --version
std::string git_revision();  // commit of the build; empty if the build was not in a repository

}  // namespace triad
