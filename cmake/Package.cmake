# find_package(dosa) for a build against an install tree.
include(CMakePackageConfigHelpers)

install(TARGETS dosa EXPORT dosa-targets)
install(EXPORT dosa-targets NAMESPACE dosa:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/dosa)
configure_package_config_file(cmake/dosa-config.cmake.in ${PROJECT_BINARY_DIR}/dosa-config.cmake
                              INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/dosa)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/dosa-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/dosa-config.cmake ${PROJECT_BINARY_DIR}/dosa-config-version.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/dosa)
