#include "train/config/schema.h"

#include <cmath>
#include <string>
#include <vector>

#include "train/config/config_fields.h"

namespace triad {

namespace {

using namespace json_config;

Json any_of(std::initializer_list<Json> schemas) { return {{"anyOf", Json(std::vector<Json>(schemas))}}; }
Json list_of(Json items) { return {{"type", "array"}, {"items", std::move(items)}}; }

Json number(const char* type, const Rule& rule) {
  Json schema = {{"type", type}};
  if (std::isfinite(rule.min)) schema[rule.min_is_open ? "exclusiveMinimum" : "minimum"] = rule.min;
  if (std::isfinite(rule.max)) schema["maximum"] = rule.max;
  return schema;
}

template <class Enum>
Json words() {
  Json all = Json::array();
  for (const auto& [word, value] : EnumWords<Enum>::words)
    if (!word.empty()) all.push_back(word);
  return {{"enum", all}};
}

template <class Struct>
Json object_schema(bool with_defaults);

template <class T>
Json value_schema(const Rule& rule) {
  if constexpr (is_optional<T>)
    return any_of({value_schema<typename ValueOf<T>::type>(rule), {{"type", "null"}}});
  else if constexpr (std::is_enum_v<T>)
    return words<T>();
  else if constexpr (std::is_same_v<T, bool>)
    return {{"type", "boolean"}};
  else if constexpr (std::is_same_v<T, int64_t>)
    return number("integer", rule);
  else if constexpr (std::is_same_v<T, double>)
    return number("number", rule);
  else if constexpr (std::is_same_v<T, std::string>)
    return {{"type", "string"}};
  else if constexpr (std::is_same_v<T, KernelChoices>)
    return any_of({words<KernelChoice>(), object_schema<KernelChoices>(true)});
  else if constexpr (std::is_same_v<T, std::vector<std::string>>)
    return any_of({{{"type", "string"}}, list_of({{"type", "string"}})});
  else if constexpr (std::is_same_v<T, std::vector<DataComponent>>)
    return any_of({{{"type", "string"}}, list_of(any_of({{{"type", "string"}}, object_schema<DataComponent>(false)}))});
  else if constexpr (is_object<T>)
    return object_schema<T>(true);
  else if constexpr (is_object_list<T>)
    return any_of({list_of(object_schema<typename T::value_type>(false)), {{"type", "null"}}});
  else
    return list_of(value_schema<typename T::value_type>(rule));
}

template <class Struct>
Json fields_schema(Struct& fields, bool with_defaults) {
  Json properties = Json::object();
  visit(fields, [&]<class T>(const char* name, T& field, const char* help, const Rule& rule) {
    Json schema = {{"description", help}};
    schema.update(value_schema<T>(rule));
    if (with_defaults && !rule.required) schema["default"] = to_json(field);
    properties[name] = std::move(schema);
  });
  return {{"type", "object"}, {"additionalProperties", false}, {"properties", std::move(properties)}};
}

template <class Struct>
Json object_schema(bool with_defaults) {
  Struct fields;
  return fields_schema(fields, with_defaults);
}

}  // namespace

Json config_schema() {
  Json properties = {{"$schema", {{"type", "string"}, {"description", "this schema's file, for editors"}}}};
  Config defaults;
  visit_groups(defaults, [&](const std::string& name, auto& group) { properties[name] = fields_schema(group, true); });
  return {{"$schema", "https://json-schema.org/draft/2020-12/schema"},
          {"title", "Config of triad train"},
          {"type", "object"},
          {"additionalProperties", false},
          {"properties", std::move(properties)}};
}

}  // namespace triad
