#include "tools/report/html.h"

#include <fmt/format.h>

#include <string_view>

namespace triad {

namespace {

std::string script_json(const Json& value) {
  std::string out;
  for (const char c : dump_json(value, -1)) {
    if (c == '<' || c == '>' || c == '&')
      out += fmt::format("\\u{:04x}", static_cast<int>(c));
    else
      out += c;
  }
  return out;
}

}  // namespace

std::string html(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string text_of(const Json& value) {
  if (value.is_null()) return "–";
  return value.is_string() ? value.get<std::string>() : dump_json(value, -1);
}

std::string number(const Json& value, const char* form) {
  return value.is_number() ? fmt::format(fmt::runtime(form), value.get<double>()) : "–";
}

std::string table(const std::vector<std::string>& header, const std::vector<std::vector<std::string>>& rows,
                  const char* kind) {
  const bool is_long = std::string_view(kind) == "events";
  std::string out = fmt::format("<div class=\"scroll{}\" tabindex=\"0\"><table class=\"{}\"><thead><tr>",
                                is_long ? " long" : "", kind);
  for (const std::string& name : header) out += "<th scope=\"col\">" + html(name) + "</th>";
  out += "</tr></thead><tbody>\n";
  for (const auto& row : rows) {
    out += "<tr>";
    for (const std::string& field : row) out += "<td>" + html(field) + "</td>";
    out += "</tr>\n";
  }
  return out + "</tbody></table></div>\n";
}

std::string card(const std::string& title, const std::string& body, bool wide) {
  return fmt::format("<section class=\"card{}\"><h3>{}</h3>{}</section>\n", wide ? " wide" : "", html(title), body);
}

std::string group(const char* title, const std::string& cards, const char* kind) {
  return cards.empty() ? "" : fmt::format("<h2>{}</h2><div class=\"grid {}\">\n{}</div>\n", title, kind, cards);
}

std::string data_element(const char* id, const Json& data) {
  return fmt::format("<script type=\"application/json\" id=\"{}\">{}</script>\n", id, script_json(data));
}

}  // namespace triad
