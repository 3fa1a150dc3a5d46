// Pieces of HTML for the report's pages. Text from files is escaped here.
#pragma once
#include <string>
#include <vector>

#include "io/json_config.h"

namespace triad {

std::string html(const std::string& text);  // escapes a text for elements and attributes

// JSON in a script element, escaped so that nothing in it can end the element.
std::string data_element(const char* id, const Json& data);

// A value as text: strings without quotes, "–" for null.
std::string text_of(const Json&);
// A number in a format such as "{:.4g}"; "–" for anything else.
std::string number(const Json&, const char* form = "{:.4g}");

// An HTML table. kind is a class in page.css: "keys" has keys and values with any length; in "events" the last column
// is text.
std::string table(const std::vector<std::string>& header, const std::vector<std::vector<std::string>>& rows,
                  const char* kind = "");
std::string card(const std::string& title, const std::string& body, bool wide = true);
// A heading with cards; nothing without cards.
std::string group(const char* title, const std::string& cards, const char* kind = "");

}  // namespace triad
