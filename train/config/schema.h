// The JSON schema of config files, from the declared keys (config_fields.h).
#pragma once
#include "io/json_config.h"

namespace triad {

// A JSON schema (draft 2020-12): every group and key with its help text, type, limits and default. Editors complete and
// check a config by it; the command line's completion reads the keys and their words from it. No key is required there,
// because --set and the environment may add those that a file lacks.
Json config_schema();

}  // namespace triad
