// What was built: version, revision, compiler, libraries.
#pragma once
#include <string>

namespace triad {

std::string version_text();  // several lines, for --version
std::string git_revision();  // of the build; empty outside of a repository

}  // namespace triad
